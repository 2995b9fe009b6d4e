"""A landing slot's memory: registered with the transport, and replaceable when its writers cannot be trusted to be gone."""

import mmap

import torch

from handoff.transport import Region, Transport


class LandingMemory:
    """One contiguous host buffer of `length` bytes."""

    def __init__(self, transport: Transport, length: int) -> None:
        self._transport = transport
        self.length = length
        self.generation = 0  # changes when the buffer does: peers must fetch the transport's metadata again
        self._retired: list[mmap.mmap] = []
        self._allocate()

    @property
    def address(self) -> int:
        """Where writers write to."""
        return self._buffer.data_ptr()

    def view(self, length: int) -> torch.Tensor:
        """Return the first `length` bytes, uint8."""
        return self._buffer[:length]

    def renew(self) -> None:
        """Go on with a new buffer, and withdraw the old one.

        Late writes fail on RDMA hardware. Other transports still land them, so the old addresses stay mapped and are never
        used again; their pages go back to the system.
        """
        self._transport.unregister([self._region])
        self._retired.append(self._pages)
        for pages in self._retired:
            pages.madvise(mmap.MADV_DONTNEED)
        self._allocate()
        self.generation += 1

    def _allocate(self) -> None:
        self._pages = mmap.mmap(-1, self.length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._buffer = torch.frombuffer(self._pages, dtype=torch.uint8)
        self._buffer.zero_()  # so that the first handoff does not pay for the pages
        self._region = Region(self._buffer.data_ptr(), self.length)
        self._transport.register([self._region])
