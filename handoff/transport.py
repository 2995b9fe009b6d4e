"""One-sided writes between processes: the small protocol that every transport satisfies.

A transfer is done when its bytes are visible in the target's memory, not when they have left this process.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NewType, Protocol

Peer = NewType("Peer", str)  # contains the label that the peer's own end was opened with


class TransportError(Exception):
    """A transport that cannot be loaded, or a write that failed: says which peer and why."""


class Progress(Enum):
    """Where a transfer stands."""

    BUSY = "busy"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes to copy: from this process's registered memory to the peer's."""

    local: int  # address
    remote: int  # address
    length: int


@dataclass(frozen=True, slots=True)
class Region:
    """Registered memory. `device` None is host memory, else the GPU's index."""

    address: int
    length: int
    device: int | None = None


class Transfer(Protocol):
    """A posted write."""

    def poll(self) -> Progress:
        """Return where it stands; raises TransportError if it failed."""
        ...

    def close(self) -> None:
        """Give it up, posted or not; idempotent. Bytes may still arrive until `poll` would have said DONE."""
        ...


class Transport(Protocol):
    """One process's end of a transport."""

    name: str

    def register(self, regions: Sequence[Region]) -> None:
        """Make memory readable by (local) and writable for (remote) transfers; raises TransportError."""
        ...

    def unregister(self, regions: Sequence[Region]) -> None:
        """Undo `register`: peers that connect from now on cannot write there.

        Peers that are connected still may. RDMA hardware refuses their writes, and Mooncake those that begin later; UCX over
        TCP or CMA lands them as before, or kills the process where the memory is gone. So it must stay mapped, and unused,
        until they are gone.
        """
        ...

    def metadata(self) -> bytes:
        """Return what a peer needs to connect and to address the memory registered so far."""
        ...

    def connect(self, metadata: bytes) -> Peer:
        """Learn of a peer and set up the connection; of a known one, learn what it has registered since.

        Raises TransportError, but waits for nobody: that a peer does not answer may be seen in the first write only.
        """
        ...

    def disconnect(self, peer: Peer) -> None:
        """Forget a peer and end its connections; unknown ones are ignored. Its writes that are not done fail."""
        ...

    def write(self, peer: Peer, pieces: Sequence[Piece], source: Region) -> Transfer:
        """Post one write of all pieces; `source` tells the kind of memory they come from. Raises TransportError."""
        ...

    def nudge(self) -> None:
        """A peer is about to connect or to write: take part in it without delay."""
        ...

    def close(self) -> None:
        """Release everything; idempotent."""
        ...
