"""What the model of the lease table can do to it: each action is one call, and is held against the judge's view of it."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import redis
from hypothesis import note
from hypothesis.stateful import RuleBasedStateMachine, invariant

from decode_daemon.slots import SlotRefused
from leases import Denied, Grant, Node, SlotRequest
from tests.kit.valkey import ValkeyProcess
from tests.unit.leases.lease_judge import Expected, Judge, MayEnd, Wish, overdue
from tests.unit.leases.lease_world import POOL, TTL_MS, WAITER_TTL_MS, Clock, Daemon, Keys, Lease, SteppedTable

MAX_WAITING = 3
BEAT_MS = TTL_MS // 3

T = TypeVar("T")


class Actions(RuleBasedStateMachine):
    """Daemons and gateways on one pool; the rules that choose among the actions are the test's."""

    def __init__(self, server: ValkeyProcess) -> None:
        super().__init__()
        self.redis = redis.Redis.from_url(server.url, decode_responses=True)
        self.bytes = redis.Redis.from_url(server.url)
        self.redis.flushall()
        self.loop = asyncio.new_event_loop()
        self.clock = Clock()
        self.table = SteppedTable(server.url, self.redis, self.clock)
        self.keys = Keys()
        self.judge = Judge()
        self.names = iter(range(1, 1_000_000))
        self.snapshot: tuple[dict[Any, Any], Expected] | None = None
        self.failed = False

    @invariant()
    def step_ends_well(self) -> None:
        self.failed = False

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        self.failed = True  # until the step has ended
        return self.loop.run_until_complete(work)

    def call(self, work: Coroutine[Any, Any, T], may_end: MayEnd = lambda _, __: False, *, expires: bool = True) -> T:
        """One call of the table that says nothing of its own but what it returns."""
        if expires:
            self.judge.expected.expire(self.clock.ms)
        outcome = self.run(work)
        note(f"  {outcome}")
        self.look_at_keys(may_end, expires=expires)
        return outcome

    def look_at_keys(self, may_end: MayEnd = lambda _, __: False, *, expires: bool) -> None:
        before, self.keys = self.keys, Keys.read(self.redis)
        self.judge.check(before, self.keys, self.clock.ms, may_end=may_end, expires=expires)

    @property
    def daemons(self) -> list[Daemon]:
        return list(self.judge.daemons.values())

    def daemon(self, number: int) -> Daemon:
        return self.daemons[number % len(self.daemons)]

    @property
    def asking(self) -> list[Wish]:
        """Those who have heard of nothing yet, in the order of their arrival."""
        return [wish for wish in self.judge.wishes.values() if wish.there and wish.grant is None]

    @property
    def first_node(self) -> tuple[str, ...]:
        return tuple(self.judge.daemons)[:1]

    @property
    def granted(self) -> list[tuple[Wish, Grant]]:
        """The latest grants; some of them are over."""
        return [(wish, wish.grant) for wish in self.judge.wishes.values() if wish.grant][-6:]

    @property
    def over(self) -> list[tuple[Daemon, int, int]]:
        """Daemon, slot and epoch of uses that have ended; first those whose slot is leased again."""
        ended = [
            (daemon, slot, epoch)
            for daemon in self.daemons
            for slot, epochs in daemon.reserved.items()
            for epoch in epochs
            if epoch != daemon.slots[slot].epoch_in_use
        ]
        return sorted(ended, key=lambda use: f"{use[0].node.node_id}:{use[1]}" not in self.keys.leases)

    def beat(self, daemon: Daemon, *, reply_lost: bool = False) -> None:
        node, now = daemon.node.node_id, self.clock.ms
        in_use = {f"{node}:{slot}": held.epoch for slot, held in daemon.held.items()}

        def may_end(member: str, lease: Lease) -> bool:
            own = member.rpartition(":")[0] == node
            epoch = in_use.get(member)
            ended = epoch != lease.epoch and (overdue(lease, now) or (epoch is not None and lease.epoch < epoch))
            return own and (was_dead or ended)

        self.judge.expected.expire(now)
        was_dead = not self.judge.expected.alive(node, now)
        self.judge.beat(daemon, now)
        states = self.run(self.table.register(daemon.node, *daemon.look()))
        note(f"  {node} beats: {states}")
        self.look_at_keys(may_end, expires=True)
        for state in states:
            member = f"{node}:{state.slot}"
            lease = self.keys.leases.get(member)
            said = (lease.epoch, True) if lease else (self.keys.epoch, False)
            assert (state.epoch, state.leased) == said, f"{member}: the daemon hears {state}, the table has {lease}"
            if member in in_use:
                assert lease, f"{member} is in use by {in_use[member]} and free in the table"
                assert lease.epoch >= in_use[member], f"{member} is in use by {in_use[member]}, the table holds on to {lease}"
            elif lease:
                assert lease.since == now or not overdue(lease, now), f"{member} was not taken back in time: {lease}"
        if not reply_lost:
            daemon.hear(states)
            self.judge.hearing.add(node)

    def unregister(self, daemon: Daemon) -> None:
        node = daemon.node.node_id
        self.judge.daemons.pop(node)
        self.judge.expected.nodes.pop(node, None)
        self.call(self.table.unregister(daemon.node), lambda member, _: member.rpartition(":")[0] == node, expires=True)

    def reserve_for(self, grant: Grant, *, told: bool) -> None:
        daemon = self.judge.daemons.get(grant.node_id)
        if daemon is None or daemon.frozen:
            return
        member = f"{grant.node_id}:{grant.slot}"
        before = daemon.reserved[grant.slot][-1:]
        try:
            self.run(daemon.reserve(grant.slot, grant.epoch))
        except SlotRefused as refusal:
            note(f"  refused: {refusal}")
            again = daemon.slots[grant.slot].epoch_in_use == grant.epoch or grant.epoch in daemon.reserved[grant.slot]
            if not again and not self.judge.may_refuse(grant, self.keys):
                raise AssertionError(f"{grant} is the lease of {member} and was refused: {refusal}") from refusal
            return
        assert not before or before[0] < grant.epoch, f"epoch {grant.epoch} of {member} was held after {before[0]}"
        lease = self.keys.leases.get(member)
        if lease is None or lease.epoch != grant.epoch:
            self.judge.muddled.add(member)
        if told:
            self.beat(daemon)

    def release(self, node: Node, slot: int, epoch: int) -> None:
        member = f"{node.node_id}:{slot}"
        held = member in self.keys.leases and self.keys.leases[member].epoch == epoch
        held = held and self.judge.expected.alive(node.node_id, self.clock.ms)  # leases end with their node
        freed = self.call(
            self.table.release(POOL, node.node_id, slot, epoch), lambda other, lease: (other, lease.epoch) == (member, epoch)
        )
        assert freed == held, f"releasing {epoch} of {member} returned {freed}"

    def ask(self, wait_ms: int, *, reply_lost: bool = False, **demand: Any) -> None:
        request = SlotRequest(
            **{"card": "a", "tokens": 10, "lease_ms": 4_000, **demand},
            pool=POOL,
            wait_ms=wait_ms,
            max_waiting=MAX_WAITING,
            nonce=f"wish-{next(self.names)}",
        )
        wish = self.judge.wishes[request.nonce] = Wish(request, self.clock.ms + wait_ms)
        self.look(wish, reply_lost=reply_lost)

    def look(self, wish: Wish, *, reply_lost: bool = False) -> None:
        nonce, now, before = wish.request.nonce, self.clock.ms, self.keys
        place = self.judge.expected.place_of(nonce)
        if place:
            place.live_until_ms = min(now + WAITER_TTL_MS, place.gives_up_ms)
        held = before.lease_of(nonce)
        repeats = held is not None and self.judge.expected.alive(held[0].rpartition(":")[0], now)
        if not repeats:
            self.judge.expected.expire(now)
        outcome = self.run(self.table.look(wish.request, max(0, wish.gives_up_ms - now)))
        note(f"  {nonce} looks: {outcome}")
        self.judge.looked(wish, outcome, before, Keys.read(self.redis), now)
        self.look_at_keys(expires=not repeats)
        if not reply_lost and isinstance(outcome, Grant):
            wish.grant = outcome
        if not reply_lost and isinstance(outcome, Denied):
            wish.there = False

    def end(self, wish: Wish) -> None:
        nonce = wish.request.nonce
        wish.there = False
        held = self.keys.lease_of(nonce)
        there = held is not None or nonce in self.keys.queue
        if held and wish.grant:
            daemon = self.judge.daemons.get(wish.grant.node_id)
            if daemon and daemon.slots[wish.grant.slot].epoch_in_use == wish.grant.epoch:
                self.judge.muddled.add(held[0])  # until the daemon learns it too
        self.judge.expected.leave(nonce)
        work = self.table.give_back(wish.grant) if wish.grant else self.table.leave(wish.request)
        ended = self.call(work, lambda _, lease: lease.nonce == nonce)
        assert ended == there, f"giving back {nonce} returned {ended}"

    def restart_empty(self) -> None:
        self.redis.flushall()
        self.redis.script_flush()
        self.keys = Keys()
        self.judge.lost(Expected(), self.keys)

    def fail_over(self, dumps: dict[Any, Any], expected: Expected) -> None:
        """The replica that takes over had not heard of what came after."""
        self.redis.flushall()
        for key, dump in dumps.items():
            self.bytes.restore(key, 0, dump)
        self.keys = Keys.read(self.redis)
        self.judge.lost(expected.copy(), self.keys)

    def teardown(self) -> None:
        try:
            if not self.failed:  # otherwise the model is behind the table
                self.everything_is_free_again()
        finally:
            self.run(self.table.aclose())
            self.bytes.close()
            self.loop.close()

    def everything_is_free_again(self) -> None:
        """Nobody uses anything any more, and nobody says so: the heartbeats alone bring it all back."""
        for daemon in self.daemons:
            daemon.frozen = False
            for slot in list(daemon.held):
                self.run(daemon.finish(slot))
            if daemon.draining:
                self.unregister(daemon)
        for _ in range(0, TTL_MS + 1_000, BEAT_MS):
            self.clock.ms += BEAT_MS
            for daemon in self.daemons:
                self.beat(daemon)
        if self.daemons:
            slots = {f"{daemon.node.node_id}:{slot.index}" for daemon in self.daemons for slot in daemon.slots}
            assert set(self.keys.free) == slots, f"{slots - self.keys.free} are lost"
            left = (self.keys.leases, self.keys.wishes, self.keys.queue, self.keys.tenants)
            assert not any(left), f"left behind: {left}"
