"""How fast this machine's cores read memory together: the limit that a decode step is held against."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import torch

_BYTES = 512 << 20  # many times any cache
_PARTS = 160  # a thread's share is a multiple of: halves and fifths of it begin with a cache line
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
        share = _BYTES // 4 // threads // _PARTS * _PARTS
        self._shares = torch.ones(threads, share).unbind()
        self._bytes = 4 * share * threads

    def bytes_per_second(self) -> float:
        """Return the rate of the way that is fastest here: the median of a few passes, which take turns."""
        passes = [[self._pass(way) for way in _WAYS] for _ in range(_PASSES)]
        fastest: float = min(median(seconds) for seconds in zip(*passes, strict=True))
        return self._bytes / fastest

    def _pass(self, way: Callable[[torch.Tensor], object]) -> float:
        """Return the seconds from when every thread is ready to when the last has read its share."""
        began: list[float] = []
        ready = threading.Barrier(len(self._shares), action=lambda: began.append(time.perf_counter()))

        def read(share: torch.Tensor) -> float:
            torch.set_num_threads(1)  # of the thread that says so: its reductions start no others
            ready.wait()
            way(share)
            return time.perf_counter()

        before = torch.get_num_threads()
        try:
            with ThreadPoolExecutor(len(self._shares)) as readers:
                return max(readers.map(read, self._shares)) - began[0]
        finally:
            torch.set_num_threads(before)
