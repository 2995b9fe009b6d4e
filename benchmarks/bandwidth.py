"""How fast this machine's cores read memory together: the limit that a decode step is held against."""

import threading
import time

import torch

_BYTES = 512 << 20  # many times any cache


class Reader:
    """Reads one buffer with a thread for each core, over and over; nothing is written.

    Two float32 streams go through a dot product, which of PyTorch's reductions reads fastest.
    """

    def __init__(self, threads: int) -> None:
        elements = _BYTES // 4 // 2 // threads * threads
        self._bytes = 2 * 4 * elements
        self._pairs = list(zip(torch.ones(elements).chunk(threads), torch.ones(elements).chunk(threads), strict=True))

    def bytes_per_second(self) -> float:
        """Return the rate of one pass over the buffer."""
        ready = threading.Barrier(len(self._pairs) + 1)
        threads = [threading.Thread(target=_read, args=(pair, ready)) for pair in self._pairs]
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for thread in threads:
                thread.start()
            ready.wait()
            began = time.perf_counter()
            for thread in threads:
                thread.join()
            return self._bytes / (time.perf_counter() - began)
        finally:
            torch.set_num_threads(before)


def _read(pair: tuple[torch.Tensor, torch.Tensor], ready: threading.Barrier) -> None:
    ready.wait()
    torch.dot(*pair)
