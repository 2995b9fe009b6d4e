"""How fast this machine's cores read memory together: the limit that a decode step is held against."""

import threading
import time
from collections.abc import Callable
from statistics import median

import torch

_BYTES = 512 << 20  # many times any cache
_STREAMS = 10  # what the ways below cut a thread's share into: its parts are whole numbers of elements
_PASSES = 3

# Reductions that follow one, two and five runs through memory at once: which of them is served best depends on the CPU.
_WAYS: tuple[Callable[[torch.Tensor], object], ...] = (
    torch.sum,
    lambda share: torch.dot(*share.chunk(2)),
    lambda share: torch.mv(share.view(5, -1)[:4], share.view(5, -1)[4]),
)


class Reader:
    """Reads one buffer with a thread for each core, over and over; nothing is written."""

    def __init__(self, threads: int) -> None:
        share = _BYTES // 4 // threads // _STREAMS * _STREAMS
        self._shares = torch.ones(threads, share).unbind()
        self._bytes = 4 * share * threads

    def bytes_per_second(self) -> float:
        """Return the rate of the way that is fastest here: the median of a few passes, which take turns."""
        passes = [[self._pass(way) for way in _WAYS] for _ in range(_PASSES)]
        fastest: float = min(median(seconds) for seconds in zip(*passes, strict=True))
        return self._bytes / fastest

    def _pass(self, way: Callable[[torch.Tensor], object]) -> float:
        """Return the seconds that one pass takes."""
        ready = threading.Barrier(len(self._shares) + 1)
        threads = [threading.Thread(target=_read, args=(way, share, ready)) for share in self._shares]
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for thread in threads:
                thread.start()
            ready.wait()
            began = time.perf_counter()
            for thread in threads:
                thread.join()
            return time.perf_counter() - began
        finally:
            torch.set_num_threads(before)


def _read(way: Callable[[torch.Tensor], object], share: torch.Tensor, ready: threading.Barrier) -> None:
    ready.wait()
    way(share)
