"""A slot under every order of events: one holder at a time, epochs that only rise, memory that nobody else writes to."""

import asyncio
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decode_daemon.memory import LandingMemory
from decode_daemon.slots import LandingSlot, Occupancy, SlotRefused, SlotState, Writer
from handoff.messages import Cancel, Sent, ToConnector
from handoff.transport import Region
from tests.kit.handoff import LANDING_BYTES, LAYOUT, claim_of, final_of
from tests.kit.network import Registry, unused_memory

TOKENS = 10
RANKS = 2
GRACE = 5.0


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time passes only when a test says so."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def turn(self, seconds: float = 0.0) -> None:
        """Let time pass, and everything happen that can."""
        self.now += seconds
        for _ in range(10):
            self.call_soon(self.stop)
            self.run_forever()

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        """Threads are done at once."""
        future = self.create_future()
        future.set_result(func(*args))
        return future


class SlotMachine(RuleBasedStateMachine):
    """The daemon's loop, its connectors and the lease table, doing anything in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = Clock()
        self.registry = Registry()
        self.said: list[tuple[bytes, ToConnector]] = []
        memory = LandingMemory(self.registry, LANDING_BYTES)  # type: ignore[arg-type]
        self.slot = LandingSlot(0, memory, lambda identity, message: self.said.append((identity, message)))
        self.held: Occupancy | None = None
        self.releasing: asyncio.Task[None] | None = None
        self.last: Occupancy | None = None  # held, or released last
        self.claims: dict[int, Any] = {}
        self.writing: dict[bytes, tuple[int, int]] = {}  # who may write: its epoch, and the memory that it was given part of
        self.highest = 0
        self.handed_out = 0

    def teardown(self) -> None:
        if self.releasing is not None:
            self.loop.turn(GRACE + 1)
            assert self.releasing.done()
        for occupancy in (self.held, self.last):
            if occupancy is not None and occupancy.landed.done() and not occupancy.landed.cancelled():
                occupancy.landed.exception()
        self.loop.close()

    def call(self, action: Any, *arguments: Any) -> Any:
        async def run() -> Any:
            return action(*arguments)

        try:
            return self.loop.run_until_complete(run())
        except SlotRefused:
            return None
        finally:
            self.loop.turn()
            if self.releasing is not None and self.releasing.done():
                self.releasing.result()
                self.releasing = None

    def message(self, epoch: int, **changes: int) -> Sent:
        counts = {"tokens": TOKENS, "blocks": LAYOUT.blocks_for(TOKENS), "bytes": LAYOUT.bytes_for(TOKENS)} | changes
        return Sent(f"handoff-{epoch}", epoch, **counts)

    newer = st.sampled_from([1, 1, 1, 2, 0, -1])  # than the newest epoch
    epochs = st.sampled_from([0, 0, 0, 0, 0, -1, 1])  # beside the one in use
    ranks = st.integers(0, RANKS - 1)

    def epoch(self, delta: int) -> int:
        """An epoch near the one in use, or near the newest one."""
        return max(0, (self.slot.epoch_in_use or self.highest) + delta)

    def identity(self, epoch: int, rank: int) -> bytes:
        """Of whoever writes this shard, or of nobody."""
        names = (b"%d-%d-a" % (epoch, rank), b"%d-%d-b" % (epoch, rank))
        return next((name for name in names if name in self.writing), names[0])

    @rule(delta=newer)
    def reserve(self, delta: int) -> None:
        epoch, floor = max(0, self.highest + delta), self.slot.floor
        occupancy = self.call(self.slot.reserve, f"handoff-{epoch}", epoch)
        free = self.held is None and self.releasing is None
        assert (occupancy is not None) == (free and epoch > floor)
        if occupancy is not None:
            self.held = self.last = occupancy
            self.highest = max(self.highest, epoch)
            writers = {address for _, address in self.writing.values()}
            assert self.slot.memory.address not in writers, "memory with a writer was handed out"

    @rule(delta=epochs, rank=ranks, engine=st.sampled_from("aaab"), tokens=st.sampled_from([TOKENS] * 4 + [TOKENS + 1]))
    def begin(self, delta: int, rank: int, engine: str, tokens: int) -> None:
        epoch = self.epoch(delta)
        identity = b"%d-%d-%s" % (epoch, rank, engine.encode())
        writer = Writer(identity, rank, RANKS, LAYOUT, tokens, engine)
        due = self.held is not None and self.held.epoch == epoch
        others = list(self.held.writers.values()) if self.held else []
        first = due and rank not in {other.shard for other in others} and all(other.engine == engine for other in others)
        failed = self.held is not None and self.held.landed.done()
        expected = first and not failed and all(other.tokens == tokens for other in others)
        granted = self.call(self.slot.begin, writer, f"handoff-{epoch}", epoch, 0.0)
        assert (granted is not None) == expected
        if granted is not None:
            length = LAYOUT.bytes_for(tokens)
            assert granted == (self.slot.memory.address + rank * length, length)
            self.writing[identity] = (epoch, self.slot.memory.address)
        elif first:  # two shards of one cache that cannot be: nothing whole will come of it
            assert self.held is not None
            assert self.held.landed.done()

    @rule(delta=epochs, rank=ranks, wrong=st.booleans())
    def sent(self, delta: int, rank: int, wrong: bool) -> None:
        epoch = self.epoch(delta)
        identity = self.identity(epoch, rank)
        if self.writing.pop(identity, None) is not None:  # only a writer can have written
            self.call(self.slot.sent, identity, self.message(epoch, **({"bytes": 1} if wrong else {})), 1.0)

    @rule(delta=epochs, rank=ranks)
    def lost(self, delta: int, rank: int) -> None:
        """Its connection is gone, and nobody knows of its bytes."""
        identity = self.identity(self.epoch(delta), rank)
        generation, releasing = self.slot.memory.generation, self.releasing
        active = {name for name, (epoch, _) in self.writing.items() if epoch == self.slot.epoch_in_use}
        self.call(self.slot.lost, identity)
        if self.held is not None and any(w.lost and w.sent is None for w in self.held.writers.values()):
            assert self.held.landed.done()
        if releasing is not None and releasing.done():  # it was the last to wait for
            assert self.slot.memory.generation == generation + 1
            assert identity in active

    @rule(delta=epochs)
    def final(self, delta: int) -> None:
        epoch = self.epoch(delta)
        self.call(self.slot.final, final_of(claim_of(f"handoff-{epoch}", epoch), TOKENS), 1.0)

    @rule(delta=epochs, rank=ranks, writing=st.booleans(), stranger=st.booleans())
    def abort(self, delta: int, rank: int, writing: bool, stranger: bool) -> None:
        epoch = self.epoch(delta)
        identity = b"scheduler" if stranger else self.identity(epoch, rank)
        if not stranger and not writing:
            self.writing.pop(identity, None)
        self.call(lambda: self.slot.abort(identity, f"handoff-{epoch}", epoch, "any reason", writing=writing))
        if self.held is not None and self.held.epoch == epoch:
            assert self.held.landed.done()

    @rule(delta=epochs, rank=ranks)
    def stopped(self, delta: int, rank: int) -> None:
        epoch = self.epoch(delta)
        identity = self.identity(epoch, rank)
        self.writing.pop(identity, None)
        self.call(self.slot.stopped, identity, f"handoff-{epoch}", epoch)

    @precondition(lambda self: self.held is not None)
    @rule()
    def release(self) -> None:
        held, self.held = self.held, None
        assert held is not None
        active = {writer.identity for writer in held.writers.values() if writer.active}
        waited_for = {writer.identity for writer in held.writers.values() if writer.active and not writer.lost}
        before, generation = len(self.said), self.slot.memory.generation
        self.releasing = self.loop.create_task(self.slot.release(held, "done", GRACE))
        self.call(lambda: None)
        told = self.said[before:]
        assert {identity for identity, _ in told} == active
        assert all(message == Cancel(held.handoff_id, held.epoch, "done") for _, message in told)
        assert held.landed.done()
        assert (self.releasing is None) == (not waited_for)
        if self.releasing is None:
            assert self.slot.memory.generation == generation + bool(active)

    @precondition(lambda self: self.last is not None and self.held is None)
    @rule()
    def release_again(self) -> None:
        generation = self.slot.memory.generation
        self.loop.run_until_complete(self.slot.release(self.last, "again", GRACE))  # type: ignore[arg-type]
        assert self.slot.memory.generation == generation

    @precondition(lambda self: self.releasing is not None)
    @rule(cancelled=st.booleans())
    def grace_ends(self, cancelled: bool) -> None:
        generation = self.slot.memory.generation
        releasing = self.releasing
        assert releasing is not None
        if cancelled:
            releasing.cancel()
            self.loop.turn()
            self.releasing = None
        else:
            self.loop.turn(GRACE + 0.01)
            self.call(lambda: None)
        assert releasing.done()
        assert self.slot.state is SlotState.FREE
        assert self.slot.memory.generation == generation + 1

    @rule(delta=epochs)
    def raise_floor(self, delta: int) -> None:
        epoch = self.epoch(delta)
        in_use = self.slot.epoch_in_use
        self.call(self.slot.raise_floor, epoch)
        if in_use is None:
            assert self.slot.floor >= epoch
            self.highest = max(self.highest, epoch)

    @invariant()
    def the_floor_never_falls(self) -> None:
        assert self.slot.floor >= self.handed_out
        self.handed_out = self.slot.floor

    @invariant()
    def there_is_one_holder_and_the_slot_says_who(self) -> None:
        if self.held is not None:
            assert self.slot.epoch_in_use == self.held.epoch
            assert self.slot.state in (SlotState.LANDING, SlotState.LANDED)
        elif self.releasing is not None:
            assert self.slot.state is SlotState.DRAINING
        else:
            assert (self.slot.state, self.slot.epoch_in_use) == (SlotState.FREE, None)

    @invariant()
    def nobody_writes_to_memory_but_the_writers_of_the_epoch_in_use(self) -> None:
        epochs = {epoch for epoch, address in self.writing.values() if address == self.slot.memory.address}
        assert epochs <= {self.slot.epoch_in_use}

    @invariant()
    def exactly_the_memory_in_use_is_registered(self) -> None:
        assert self.registry.regions == [Region(self.slot.memory.address, LANDING_BYTES)]

    @invariant()
    def a_whole_cache_is_one_of_all_ranks(self) -> None:
        held = self.held
        if held is not None and held.landed.done() and held.landed.exception() is None:
            assert all(held.writers[rank].sent == self.message(held.epoch) for rank in range(RANKS))
            assert len({writer.engine for writer in held.writers.values()}) == 1
            landed = held.landed.result()
            assert landed.prompt == tuple(range(TOKENS))
            assert (landed.shards, landed.bytes) == (RANKS, RANKS * LAYOUT.bytes_for(TOKENS))


SlotMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSlot = SlotMachine.TestCase


async def test_a_slot_shows_its_whole_life() -> None:
    slot = LandingSlot(0, unused_memory(), lambda *_: None)
    seen = [slot.state]
    held = slot.reserve("h", 1)
    seen.append(slot.state)
    slot.begin(Writer(b"w", 0, 1, LAYOUT, TOKENS, "engine"), "h", 1, 10.0)
    slot.sent(b"w", Sent("h", 1, TOKENS, LAYOUT.blocks_for(TOKENS), LAYOUT.bytes_for(TOKENS)), 10.5)
    slot.final(final_of(claim_of("h", 1), TOKENS), 11.25)
    seen.append(slot.state)
    assert (await held.landed).seconds == 1.25
    held.decoding = True
    seen.append(slot.state)
    await slot.release(held, "done", GRACE)
    seen.append(slot.state)
    assert seen == [SlotState.FREE, SlotState.LANDING, SlotState.LANDED, SlotState.DECODING, SlotState.FREE]
    with pytest.raises(SlotRefused, match="epoch 1 of slot 0 is over: 1 has been seen"):
        slot.reserve("h", 1)


async def test_the_table_cannot_retire_the_epoch_that_is_in_use() -> None:
    slot = LandingSlot(0, unused_memory(), lambda *_: None)
    held = slot.reserve("h", 5)
    for epoch in (3, 5, 9):
        slot.raise_floor(epoch)
    assert (slot.floor, slot.epoch_in_use) == (5, 5)
    await slot.release(held, "done", GRACE)
    slot.raise_floor(9)
    with pytest.raises(SlotRefused, match="epoch 9"):
        slot.reserve("h", 9)
