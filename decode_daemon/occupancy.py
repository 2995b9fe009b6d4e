"""One lease's use of a landing slot: which shards of a KV cache come from whom, and when they are a whole.

A KV cache of several tensor-parallel ranks lands shard after shard, each written by its own rank. It is whole when every shard
has said Sent and the scheduler side has said Final; the first thing that goes wrong ends the wait for all of them.
"""

import asyncio
import struct
from dataclasses import dataclass, field

from handoff.layout import KVLayout
from handoff.messages import Final, Sent


class SlotRefused(Exception):  # noqa: N818 - a refusal, not a fault
    """This slot is not for this caller: `code` is stable, the message says which epoch is held."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class HandoffFailed(Exception):  # noqa: N818 - as above
    """The KV cache will not arrive."""


@dataclass(frozen=True, slots=True)
class Landed:
    """A whole KV cache in a slot's memory: shard after shard, each `layout.bytes_for(len(prompt))` bytes."""

    layout: KVLayout  # of each shard
    prompt: tuple[int, ...]
    first_token: int
    finished: bool  # the first token ends the answer
    bytes: int  # of all shards
    seconds: float  # from the first accepted writer to the last word that made it whole
    shards: int = 1


@dataclass(slots=True)
class Writer:
    """One connector rank that may write."""

    identity: bytes
    shard: int
    shards: int
    layout: KVLayout
    tokens: int
    engine: str  # of the vLLM whose rank it is
    sent: Sent | None = None
    active: bool = True  # writes may be in flight
    lost: bool = False  # its connection is gone: it will say nothing more

    @property
    def length(self) -> int:
        """Bytes in its shard."""
        return self.layout.bytes_for(self.tokens)


@dataclass(slots=True)
class Occupancy:
    """Who writes, what has been said, and the future of the whole."""

    handoff_id: str
    epoch: int
    landed: "asyncio.Future[Landed]"
    writers: dict[int, Writer] = field(default_factory=dict)  # by shard
    final: Final | None = None
    started: float | None = None
    cancelled: str | None = None  # why the writers were told to stop
    decoding: bool = False
    owed: int = 0  # output tokens that the engine may still have to make for it

    def repeated(self, writer: Writer) -> Writer | None:
        """Return this rank's writer if it writes already, by the same link: its Begin comes again where the answer was lost."""
        known = self.writers.get(writer.shard)
        if known is None or not known.active or known.lost:
            return None

        def told(one: Writer) -> object:
            return one.identity, one.engine, one.tokens, one.shards, one.layout

        return known if told(known) == told(writer) else None

    def admit(self, writer: Writer, room: int, now: float) -> int:
        """Let a rank write its shard into a region of `room` bytes; returns where its part begins.

        Raises SlotRefused. Unless that shard, or another engine's, is being written already, the handoff has failed then.
        """
        self.expects(writer)
        try:
            self._check(writer, room)
        except SlotRefused as refusal:
            self.fail(str(refusal))
            raise
        self.writers[writer.shard] = writer
        self.started = self.started or now
        return writer.shard * writer.length

    def expects(self, writer: Writer) -> None:
        """Raise SlotRefused where that shard, or another engine's, is being written already."""
        for other in self.writers.values():
            if other.engine != writer.engine:
                raise SlotRefused("replayed", f"another vLLM ({other.engine}) has already begun handoff {self.handoff_id}")
        if writer.shard in self.writers:
            raise SlotRefused("replayed", f"shard {writer.shard} has already begun handoff {self.handoff_id}")
        if self.landed.done():  # nobody would read it, and its memory would wait for a writer that may be gone
            raise SlotRefused("failed", f"handoff {self.handoff_id} has failed already")

    def arrived(self, identity: bytes, message: Sent, now: float) -> None:
        """One shard's writes are done; raises SlotRefused for what no accepted writer can say."""
        writer = self._writer(identity)
        due = Sent(self.handoff_id, self.epoch, writer.tokens, writer.layout.blocks_for(writer.tokens), writer.length)
        if message != due:
            self.fail(f"{_amount(message)} arrived as shard {writer.shard}, {_amount(due)} were due")
            return
        writer.sent = message
        self._complete(now)

    def ended(self, message: Final, now: float) -> None:
        """Prefill is over; only the first such word counts."""
        if self.final is None:
            self.final = message
            self._complete(now)

    def fail(self, reason: str) -> None:
        """Nothing whole will come of it; the first reason is kept."""
        if not self.landed.done():
            self.landed.set_exception(HandoffFailed(reason))

    def stopped(self, identity: bytes) -> None:
        """None of this writer's writes is or will be in flight."""
        for writer in self.writers.values():
            if writer.identity == identity:
                writer.active = False

    def lose(self, identity: bytes) -> None:
        """This writer's connection is gone: what it has not said it never will, and its last bytes may be on their way.

        One that has said Sent has nothing more to say.
        """
        for writer in self.writers.values():
            if writer.identity == identity:
                writer.lost = True
                if writer.sent is None:
                    self.fail(f"the connection to the vLLM rank that writes shard {writer.shard} is gone")

    def _check(self, writer: Writer, room: int) -> None:
        for other in self.writers.values():
            pairs = {
                "shards": (writer.shards, other.shards),
                "tokens": (writer.tokens, other.tokens),
                "layout": (writer.layout.fingerprint, other.layout.fingerprint),
            }
            for name, (this, that) in pairs.items():
                if this != that:
                    raise SlotRefused(
                        "unlike_shards", f"{name} differs: shard {writer.shard} has {this}, shard {other.shard} has {that}"
                    )
        if writer.tokens < 1:
            raise SlotRefused("no_tokens", f"handoff {self.handoff_id} is of {writer.tokens} tokens")
        if (length := writer.length * writer.shards) > room:
            raise SlotRefused("too_long", f"{writer.tokens} tokens need {length} bytes; the slot has {room}")

    def _complete(self, now: float) -> None:
        if self.final is None or self.landed.done() or not self.writers:
            return
        first = next(iter(self.writers.values()))
        if sum(writer.sent is not None for writer in self.writers.values()) < first.shards:
            return
        tokens = first.tokens
        if len(self.final.prompt) != 4 * tokens:
            self.fail(f"KV of {tokens} tokens arrived for a prompt of {len(self.final.prompt) / 4:g}")
            return
        if not 0 <= self.final.first_token < 1 << 32:
            self.fail(f"the first token is {self.final.first_token}")
            return
        self.landed.set_result(
            Landed(
                layout=first.layout,
                prompt=struct.unpack(f"<{tokens}I", self.final.prompt),
                first_token=self.final.first_token,
                finished=self.final.finished,
                bytes=first.length * first.shards,
                seconds=now - (self.started or now),
                shards=first.shards,
            )
        )

    def _writer(self, identity: bytes) -> Writer:
        for writer in self.writers.values():
            if writer.identity == identity:
                return writer
        raise SlotRefused("unknown_writer", f"no accepted writer of handoff {self.handoff_id} says this")


def _amount(sent: Sent) -> str:
    return f"{sent.tokens} tokens in {sent.blocks} blocks of {sent.bytes} bytes in all"
