"""A network that a test can stop and break, over the real transport; and memory that no network knows."""

import threading
from collections.abc import Callable, Sequence
from functools import partial

from decode_daemon.memory import LandingMemory
from handoff.nixl import NixlTransport
from handoff.transport import Peer, Piece, Progress, Region, Transfer, TransportError
from tests.kit.handoff import LANDING_BYTES


class _HeldTransfer:
    """A write that stays in flight until the gate opens, and is only then posted."""

    def __init__(self, gate: threading.Event, post: Callable[[], Transfer]) -> None:
        self._gate = gate
        self._post = post
        self._posted: Transfer | None = None

    def poll(self) -> Progress:
        if not self._gate.is_set():
            return Progress.BUSY
        if self._posted is None:
            self._posted = self._post()
        return self._posted.poll()

    def close(self) -> None:
        if self._posted is not None:
            self._posted.close()


class HeldTransport(NixlTransport):
    """A network that can be stopped: writes wait for `gate`. `break_after`: that many writes work, the others fail."""

    def __init__(self, *, break_after: int | None = None) -> None:
        super().__init__("held")
        self.gate = threading.Event()
        self.late: list[Callable[[], Transfer]] = []  # every write, to be posted again by a test
        self._works = break_after

    def write(self, peer: Peer, pieces: Sequence[Piece], source: Region) -> Transfer:
        if self._works is not None:
            self._works -= 1
            if self._works < 0:
                raise TransportError(f"the network to {peer} is broken")
        post = partial(super().write, peer, pieces, source)
        self.late.append(post)
        return _HeldTransfer(self.gate, post)


class Registry:
    """The part of a transport that memory needs, with nobody who writes."""

    def __init__(self) -> None:
        self.regions: list[Region] = []

    def register(self, regions: Sequence[Region]) -> None:
        self.regions += regions

    def unregister(self, regions: Sequence[Region]) -> None:
        for region in regions:
            self.regions.remove(region)


def unused_memory() -> LandingMemory:
    """A slot's memory that no transport knows."""
    return LandingMemory(Registry(), LANDING_BYTES)  # type: ignore[arg-type]
