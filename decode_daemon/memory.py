"""A landing slot's memory: registered with the transport, and replaceable when its writers cannot be trusted to be gone."""

import mmap
import threading
from dataclasses import dataclass

import structlog
import torch

from handoff.transport import Region, Transport

log = structlog.get_logger(__name__)

# Slots renew their memory in threads: a transport is told of one change at a time, and one buffer at a time is filled.
_renewing = threading.Lock()


@dataclass(frozen=True, slots=True)
class _Buffer:
    pages: mmap.mmap
    content: torch.Tensor  # uint8
    region: Region


class LandingMemory:
    """One contiguous host buffer of `length` bytes."""

    def __init__(self, transport: Transport, length: int) -> None:
        self._transport = transport
        self.length = length
        self.generation = 0  # changes when the buffer does: peers must fetch the transport's metadata again
        self._retired: list[mmap.mmap] = []
        self._buffer = self._allocate()

    @property
    def address(self) -> int:
        """Where writers write to."""
        return self._buffer.region.address

    def view(self, length: int) -> torch.Tensor:
        """Return the first `length` bytes, uint8."""
        return self._buffer.content[:length]

    def renew(self) -> None:
        """Go on with a new buffer, and withdraw the old one; for the time it takes, anybody's thread but the event loop's.

        Late writes fail on RDMA hardware. Other transports still land them, so the old addresses stay mapped and are never
        used again; their pages go back to the system. Raises OSError, TransportError or whatever the transport does: the old
        buffer is in place then, without its content, and must not be used; renew again.
        """
        with _renewing:
            old = self._buffer
            old.pages.madvise(mmap.MADV_DONTNEED)  # first: there need not be room for both
            self._buffer = self._allocate()
            self.generation += 1  # last: whoever sees it finds the new buffer in the transport's metadata
            self._retired.append(old.pages)
            try:
                self._transport.unregister([old.region])
            except Exception:  # it stays registered, mapped and unused: nobody is harmed
                log.exception("old landing memory is still registered", region=str(old.region))
            for pages in self._retired:
                pages.madvise(mmap.MADV_DONTNEED)

    def _allocate(self) -> _Buffer:
        pages = mmap.mmap(-1, self.length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        content = torch.frombuffer(pages, dtype=torch.uint8)
        content.zero_()  # so that the first handoff does not pay for the pages
        region = Region(content.data_ptr(), self.length)
        self._transport.register([region])
        return _Buffer(pages, content, region)
