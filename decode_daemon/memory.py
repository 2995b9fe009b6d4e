"""A landing slot's memory: registered with the transport, and replaceable when its writers cannot be trusted to be gone."""

import threading

import structlog
import torch

from decode_daemon.buffers import HOST, Buffer, Place, allocate
from handoff.transport import Region, Transport
from handoff.transports import TransportName

log = structlog.get_logger(__name__)

# Slots renew their memory in threads: a transport is told of one change at a time, and one buffer at a time is filled.
_renewing = threading.Lock()


def landing_place(engine: torch.device, transport: TransportName) -> Place:
    """Return where KV lands for an engine whose cache is on the device `engine`: there, if the transport can write to it.

    Ask before the transport is opened, in the same thread: UCX uses a GPU whose context is current in the thread it starts in.
    """
    if engine.type != "cuda":
        return HOST
    torch.cuda.synchronize(engine)
    place = Place(engine, pinned=True)
    return place if transport == "nixl" else place.on_the_host()


class LandingMemory:
    """One contiguous buffer of `length` bytes at `place`, or where there is room instead."""

    def __init__(self, transport: Transport, length: int, place: Place = HOST) -> None:
        """Allocate and register; raises OSError or TransportError."""
        self._transport = transport
        self._place = place
        self.length = length
        self.generation = 0  # changes when the buffer does: peers must fetch the transport's metadata again
        self._retired: list[Buffer] = []
        self._buffer = self._allocate()

    @property
    def region(self) -> Region:
        """The buffer's place: a GPU's memory, or the host's."""
        return self._buffer.region

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
        used again; the host's pages go back to the system. A GPU's memory stays taken, so the new buffer lies on the host: in
        all its time a slot takes no more than its length of a GPU. Raises OSError, TransportError or whatever the transport
        does: the old buffer is in place then, without its content, and must not be used; renew again.
        """
        with _renewing:
            old = self._buffer
            old.forsake()  # first: the host need not have room for both
            self._place = self._place.on_the_host()
            self._buffer = self._allocate()
            self.generation += 1  # last: whoever sees it finds the new buffer in the transport's metadata
            self._retired.append(old)
            try:
                self._transport.unregister([old.region])
            except Exception:  # it stays registered, mapped and unused: nobody is harmed
                log.exception("old landing memory is still registered", region=str(old.region))
            for buffer in self._retired:
                buffer.forsake()

    def _allocate(self) -> Buffer:
        buffer = allocate(self.length, self._place)
        self._transport.register([buffer.region])
        return buffer
