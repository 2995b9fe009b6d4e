"""One request's way from vLLM's blocks to a landing region: a small state machine without sockets."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate

from handoff.claim import SignedClaim
from handoff.transport import Peer, Piece, Region, Transfer, TransportError


@dataclass(frozen=True, slots=True)
class Pending:
    """Blocks of some layers (None: of all) to write once `ready()`. After the `last` nothing more comes."""

    first_block: int
    blocks: tuple[int, ...]
    last: bool
    ready: Callable[[], bool]
    layers: range | None = None


@dataclass(slots=True)
class Outgoing:
    """A handoff this rank sends.

    `address` is None until the daemon accepts. `ended` means that nothing more will be posted; it is settled once no transfer
    is in flight either.
    """

    request_id: str
    claim: SignedClaim
    prompt_tokens: int
    deadline: float | None
    remind_at: float = 0.0  # the daemon has answered, or is asked again
    hellos: int = 0
    asked: Peer | None = None  # the daemon's transport when Begin was said: what it grants is that one's memory
    address: int | None = None
    length: int = 0
    peer: Peer | None = None
    pending: list[Pending] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    started: float | None = None
    blocks: int = 0
    bytes: int = 0
    complete: bool = False
    ended: bool = False
    failure: str | None = None
    cancelled: bool = False  # by the daemon
    rejected: bool = False  # by the daemon, which let another write or knows why not
    abandoned: bool = False  # a write may still be in flight: the daemon must not be told otherwise
    doubtful: bool = False  # the daemon did not answer, or a write to it failed

    @property
    def handoff_id(self) -> str:
        """The claim's."""
        return self.claim.claim.handoff_id

    @property
    def peer_address(self) -> tuple[str, int]:
        """The daemon's control socket."""
        return self.claim.claim.host, self.claim.claim.port

    @property
    def busy(self) -> bool:
        """Whether the thread must look again soon."""
        return bool(self.transfers) or (self.address is not None and bool(self.pending))

    def accept(self, address: int, length: int, peer: Peer) -> None:
        """The daemon lets this rank write `length` bytes from `address` on."""
        if self.ended or self.address is not None:
            return
        self.address, self.length, self.peer, self.deadline = address, length, peer, None

    def withdraw(self, reason: str, *, cancelled: bool = False, rejected: bool = False, doubtful: bool = False) -> None:
        """Post nothing more; transfers in flight run out. The first reason is kept."""
        self.doubtful = self.doubtful or doubtful
        if not self.ended:
            self.ended = True
            self.failure = reason
            self.cancelled = cancelled
            self.rejected = rejected
            self.pending.clear()

    def abandon(self, transfers: Sequence[Transfer]) -> None:
        """Give up on transfers that failed or do not end; some of their bytes may still be on their way."""
        for transfer in transfers:
            self.abandoned = True
            self.transfers.remove(transfer)
            with suppress(TransportError):  # it stays in flight; `abandoned` says so
                transfer.close()

    def count(self, pending: Pending, pieces: Sequence[Piece]) -> None:
        """Account for a posted chunk. Blocks are those of the prompt: counted once, not once a layer."""
        if pending.layers is None or 0 in pending.layers:
            self.blocks += len(pending.blocks)
        self.bytes += sum(piece.length for piece in pieces)
        self.complete = self.complete or pending.last

    def pieces(self, pending: Pending, layers: Sequence[Region], block_bytes: Sequence[int]) -> list[Piece]:
        """Return the copies for one chunk, runs of adjacent blocks merged.

        layers, block_bytes: of the whole cache, in execution order. The landing region holds layer after layer, each with all
        of the prompt's blocks in order. Raises TransportError when the chunk does not fit what was granted, or lies outside
        the cache.
        """
        if self.address is None:
            raise TransportError("no landing region was granted")
        granted = self.length // sum(block_bytes)
        if pending.first_block + len(pending.blocks) > granted:
            raise TransportError(
                f"{len(pending.blocks)} blocks from {pending.first_block} on do not fit a region of {granted} blocks"
            )
        pieces: list[Piece] = []
        begins = list(accumulate((granted * size for size in block_bytes), initial=self.address))
        for index in range(len(layers)) if pending.layers is None else pending.layers:
            layer, size = layers[index], block_bytes[index]
            remote = begins[index] + pending.first_block * size
            for first, count in _runs(pending.blocks):
                if (first + count) * size > layer.length:
                    raise TransportError(f"block {first + count - 1} lies outside the KV cache")
                pieces.append(Piece(layer.address + first * size, remote, count * size))
                remote += count * size
        return pieces


def _runs(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Return (first, count) for each run of consecutive block ids."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and runs[-1][0] + runs[-1][1] == block:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return runs
