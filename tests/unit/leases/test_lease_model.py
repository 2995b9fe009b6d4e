"""The lease table against a model of it: whatever is done, lost, repeated or forgotten, in whatever order.

A machine starts, freezes and kills daemons and gateways, loses replies, empties the server and puts old snapshots back; after
each step it holds the table against what the daemons know and what the model expects. Time passes when the machine says so, so
an example that failed fails again. 150 runs are tried, always the same ones; with `ANCHORLEG_MODEL_EXAMPLES` so many new ones.
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test

from leases import Node, Tenant
from tests.kit.valkey import ValkeyProcess
from tests.unit.leases.lease_actions import Actions
from tests.unit.leases.lease_world import POOL, TTL_MS, Daemon, Keys

EXAMPLES = int(os.environ.get("ANCHORLEG_MODEL_EXAMPLES", "150"))
STEPS = 50
TENANTS = (Tenant("acme", max_leases=2, max_waiting=2), Tenant("burns", max_leases=1, max_waiting=1))
LOOK_MS = 400  # between two looks of a waiter, and twice that between two heartbeats; no multiple of the waiters' TTL
RETENTION_MS = 3_600_000  # of a pool that nobody renews

which = st.integers(0, 7)  # of those there are, counted round
lost = st.sampled_from([False, False, False, True])


class LeaseMachine(Actions):
    """What happens, in any order."""

    # --- Daemons ---

    @initialize(slots=st.integers(1, 2))
    def begin(self, slots: int) -> None:
        self.start_daemon(slots=slots, capacity=1_000, card="a")

    @precondition(lambda self: len(self.daemons) < 3)
    @rule(slots=st.integers(1, 3), capacity=st.sampled_from([100, 1_000, 1_000]), card=st.sampled_from("aaaaab"))
    def start_daemon(self, slots: int, capacity: int, card: str) -> None:
        name = f"node-{next(self.names)}"
        daemon = Daemon(Node(name, POOL, card, f"{name}:1", name, 2, capacity, slots))
        self.judge.daemons[name] = daemon
        self.beat(daemon)

    @precondition(lambda self: self.daemons)
    @rule(number=which, reply_lost=lost)
    def heartbeat(self, number: int, reply_lost: bool) -> None:
        daemon = self.daemon(number)
        if not daemon.frozen:
            self.beat(daemon, reply_lost=reply_lost)

    @precondition(lambda self: self.daemons)
    @rule(number=which, what=st.sampled_from(["freeze", "freeze", "drain", "drain", "kill"]))
    def trouble_a_daemon(self, number: int, what: str) -> None:
        """Frozen, it comes back at the second time; draining, it leaves then."""
        daemon = self.daemon(number)
        if what == "freeze":
            daemon.frozen = not daemon.frozen
        elif what == "kill":
            self.judge.daemons.pop(daemon.node.node_id)
        elif not daemon.draining:
            daemon.draining = True
            self.beat(daemon)
        elif not daemon.held:
            self.unregister(daemon)

    @precondition(lambda self: self.granted)
    @rule(number=which, told=st.booleans())
    def reserve(self, number: int, told: bool) -> None:
        """A grant's holder turns up at the daemon: early, late, or twice."""
        _, grant = self.granted[number % len(self.granted)]
        self.reserve_for(grant, told=told)

    @precondition(lambda self: self.granted)
    @rule(told=st.booleans())
    def reserve_latest(self, told: bool) -> None:
        self.reserve_for(self.granted[-1][1], told=told)

    @precondition(lambda self: any(daemon.held for daemon in self.daemons))
    @rule(number=which, told=st.booleans())
    def finish(self, number: int, told: bool) -> None:
        busy = [(daemon, slot) for daemon in self.daemons for slot in daemon.held]
        daemon, slot = busy[number % len(busy)]
        if daemon.frozen:
            return
        epoch = self.run(daemon.finish(slot))
        self.judge.muddled.discard(f"{daemon.node.node_id}:{slot}")
        if told:
            self.release(daemon.node, slot, epoch)

    @precondition(lambda self: self.over)
    @rule(number=which)
    def release_late(self, number: int) -> None:
        """A repeated release, or one that was long on its way; it is only ever sent after use."""
        daemon, slot, epoch = self.over[number % len(self.over)]
        self.release(daemon.node, slot, epoch)

    # --- Gateways ---

    @rule(wait_ms=st.sampled_from([0, 5_000]))
    def acquire(self, wait_ms: int) -> None:
        self.ask(wait_ms)

    @rule(waiting=st.lists(st.sampled_from([10, 10, 101]), max_size=3), avoid=st.booleans(), used=st.booleans())
    def crowd_in(self, waiting: list[int], avoid: bool, used: bool) -> None:
        """Every slot is taken, perhaps used at once, and more wait: for so many tokens, the first perhaps not on every node."""
        for _ in range(12):
            self.ask(20_000)
            if self.asking:  # the latest wish waits
                break
            if used and self.granted:
                self.reserve_latest(told=True)
        for number, tokens in enumerate(waiting):
            self.ask(20_000, tokens=tokens, avoid=self.first_node if avoid and number == 0 else ())

    @rule(tenant=st.sampled_from(TENANTS), wait_ms=st.sampled_from([0, 20_000]))
    def acquire_on_account(self, tenant: Tenant, wait_ms: int) -> None:
        self.ask(wait_ms, tenant=tenant)

    @rule(
        tokens=st.sampled_from([10, 100, 101, 2_000]),
        card=st.sampled_from("aaab"),
        lease_ms=st.sampled_from([200, 1_000, 4_000]),
        wait_ms=st.sampled_from([0, 300, 20_000]),
        tenant=st.sampled_from((None, *TENANTS)),
        avoid=st.booleans(),
        reply_lost=lost,
    )
    def acquire_something(self, wait_ms: int, avoid: bool, reply_lost: bool, **demand: Any) -> None:
        self.ask(wait_ms, avoid=self.first_node if avoid else (), reply_lost=reply_lost, **demand)

    @precondition(lambda self: self.asking)
    @rule(number=which, reply_lost=lost)
    def ask_again(self, number: int, reply_lost: bool) -> None:
        """A waiter looks, or a caller that lost the reply repeats itself."""
        self.look(self.asking[number % len(self.asking)], reply_lost=reply_lost)

    @precondition(lambda self: self.asking)
    @rule()
    def all_look(self) -> None:
        for wish in self.asking:
            self.look(wish)

    @precondition(lambda self: self.granted)
    @rule(number=which)
    def give_back(self, number: int) -> None:
        """Also a second time, and also a grant that was taken back or used."""
        wish, _ = self.granted[number % len(self.granted)]
        self.end(wish)

    @precondition(lambda self: self.asking)
    @rule(number=which, politely=st.booleans())
    def stop_asking(self, number: int, politely: bool) -> None:
        wish = self.asking[number % len(self.asking)]
        wish.there = False
        if politely:
            self.end(wish)

    # --- The rest of the world ---

    @rule(ms=st.integers(1, 400) | st.just(TTL_MS + 200))
    def tick(self, ms: int) -> None:
        """Time in which nothing reaches the server."""
        self.clock.ms += ms

    @rule(looks=st.sampled_from([1, 1, 3, 9]), looking=st.booleans())
    def time_passes(self, looks: int, looking: bool) -> None:
        """With the heartbeats that belong to it, and perhaps the waiters' looks."""
        for number in range(looks):
            self.clock.ms += LOOK_MS
            for daemon in self.daemons:
                if not daemon.frozen and number % 2 == 0:
                    self.beat(daemon)
            if looking:
                self.all_look()

    @rule()
    def inspect(self) -> None:
        report = self.call(self.table.inspect()).get(POOL)
        seen = {f"{n.node.node_id}:{s.slot}": s.epoch for n in (report.nodes if report else ()) for s in n.slots}
        assert {member: epoch for member, epoch in seen.items() if epoch} == {m: le.epoch for m, le in self.keys.leases.items()}
        view = self.call(self.table.pools()).get(POOL)
        numbers = (view.nodes, view.free_slots, view.leased_slots, view.waiting) if view else (0, 0, 0, len(self.keys.queue))
        assert numbers == (len(self.keys.nodes), len(self.keys.free), len(self.keys.leases), len(self.keys.queue))

    @rule()
    def take_snapshot(self) -> None:
        self.snapshot = {key: self.bytes.dump(key) for key in self.bytes.scan_iter()}, self.judge.expected.copy()

    @precondition(lambda self: len(self.judge.wishes) > 3)
    @rule(what=st.sampled_from(["restart", "restart", "fail over", "fail over", "fail over", "an hour"]))
    def trouble_the_server(self, what: str) -> None:
        if what == "restart":
            self.restart_empty()
        elif what == "an hour":
            self.nobody_comes_for_an_hour()
        elif self.snapshot:
            self.fail_over(*self.snapshot)

    def nobody_comes_for_an_hour(self) -> None:
        """The pool's keys run out, those that have an end; whoever returns first finds a table that can be used."""
        self.judge.daemons.clear()
        for wish in self.judge.wishes.values():
            wish.there = False
        self.clock.ms += RETENTION_MS
        for key in self.redis.scan_iter():
            if self.redis.pttl(key) > 0:
                self.redis.delete(key)
        self.keys = Keys.read(self.redis)
        self.judge.lost(self.judge.expected, self.keys)
        self.run(self.table.pools())
        self.start_daemon(slots=1, capacity=1_000, card="a")


@pytest.fixture(scope="module")
def model_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyProcess]:
    """Its own: other tests flush theirs."""
    with ValkeyProcess(tmp_path_factory.mktemp("valkey")) as process:
        yield process


@pytest.mark.timeout(60 + EXAMPLES)
def test_no_order_of_events_breaks_the_table(model_server: ValkeyProcess) -> None:
    class OnThisServer(LeaseMachine):
        def __init__(self) -> None:
            super().__init__(model_server)

    run_state_machine_as_test(
        OnThisServer,
        settings=settings(
            max_examples=EXAMPLES,
            derandomize="ANCHORLEG_MODEL_EXAMPLES" not in os.environ,
            stateful_step_count=STEPS,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
