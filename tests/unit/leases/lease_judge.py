"""What must be true of the lease table after each call, worked out beside the table from what was called and when."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field

from hypothesis import note

from leases import Denied, Grant, NoSlot, SlotRequest
from tests.unit.leases.lease_world import LANDING_MS, TTL_MS, WAITER_TTL_MS, Daemon, Keys, Lease

MayEnd = Callable[[str, Lease], bool]
"""Whether the call may end this lease of this slot ("node:slot")."""


@dataclass(slots=True)
class Wish:
    """One request at its gateway."""

    request: SlotRequest
    gives_up_ms: int
    grant: Grant | None = None  # that the gateway has heard of
    there: bool = True  # the gateway lives, and wants it


@dataclass(slots=True)
class Waiting:
    """A place in the queue."""

    nonce: str
    gives_up_ms: int
    live_until_ms: int


@dataclass(slots=True)
class Listed:
    """A node in the table."""

    until_ms: int
    draining: bool


@dataclass(slots=True)
class Expected:
    """What the table should hold."""

    queue: list[Waiting] = field(default_factory=list)
    nodes: dict[str, Listed] = field(default_factory=dict)

    def place_of(self, nonce: str) -> Waiting | None:
        return next((waiting for waiting in self.queue if waiting.nonce == nonce), None)

    def alive(self, node: str, now: int) -> bool:
        return node in self.nodes and self.nodes[node].until_ms > now

    def leave(self, nonce: str) -> None:
        self.queue = [waiting for waiting in self.queue if waiting.nonce != nonce]

    def expire(self, now: int) -> None:
        self.queue = [waiting for waiting in self.queue if waiting.live_until_ms > now]
        self.nodes = {node: listed for node, listed in self.nodes.items() if listed.until_ms > now}

    def copy(self) -> "Expected":
        return deepcopy(self)


class Judge:
    """Follows every call and compares."""

    def __init__(self) -> None:
        self.expected = Expected()
        self.daemons: dict[str, Daemon] = {}  # that live
        self.wishes: dict[str, Wish] = {}
        self.unheard: set[str] = set()  # nodes without a heartbeat since the table lost what it knew
        self.muddled: set[str] = set()  # slots that a daemon holds for an epoch which the table had given up
        self.doubtful: set[tuple[str, int]] = set()  # grants of a table that had lost what it knew
        self.used: set[tuple[str, int]] = set()  # that daemons told of
        self.hearing: set[str] = set()  # nodes that have got an answer since then
        self._granted: dict[tuple[str, int], tuple[int, bool]] = {}  # after how many losses, and whether the node was hearing
        self._losses = 0
        self._lost_all = False

    # --- What happened ---

    def beat(self, daemon: Daemon, now: int) -> None:
        node = daemon.node.node_id
        self.expected.nodes[node] = Listed(now + TTL_MS, daemon.draining)
        self.unheard.discard(node)
        self.used |= {(f"{node}:{slot}", held.epoch) for slot, held in daemon.held.items()}

    def looked(self, wish: Wish, outcome: Grant | Denied | None, before: Keys, after: Keys, now: int) -> None:
        nonce = wish.request.nonce
        if isinstance(outcome, Denied):
            self.expected.leave(nonce)
            self._denied(wish, outcome, after, now)
        elif outcome is None and self.expected.place_of(nonce) is None:
            give_up = wish.gives_up_ms
            self.expected.queue.append(Waiting(nonce, give_up, min(now + WAITER_TTL_MS, give_up)))
        elif outcome is not None:
            held = after.lease_of(nonce)
            assert held, f"{nonce} was granted {outcome}, and no lease of it is in the table"
            assert held[1].epoch == outcome.epoch, f"{nonce} was granted {outcome} while its lease is {held}"
            assert held[0] == f"{outcome.node_id}:{outcome.slot}", f"{nonce} was granted {outcome} while its lease is {held}"
            assert held[1].stage != "o", f"{nonce} has fetched its slot, which would still go to the next"
            assert self.expected.alive(outcome.node_id, now), f"{nonce} was granted {outcome}; its node counts as dead"
            earlier = before.lease_of(nonce)
            if earlier and earlier[1].stage != "o":
                assert held == earlier, f"{nonce} asked again and its lease went from {earlier} to {held}"

    def lost(self, expected: Expected, keys: Keys) -> None:
        """The server came back with nothing, or with what it knew some time ago."""
        self.expected = expected
        self.unheard = set(self.daemons)
        self.hearing.clear()
        self._losses += 1
        self._lost_all = keys.epoch is None
        self.doubtful |= {(member, lease.epoch) for member, lease in keys.leases.items()}

    # --- What must be true ---

    def check(self, before: Keys, after: Keys, now: int, *, may_end: MayEnd, expires: bool) -> None:
        """Hold what one call did against what it may do; `expires`: it also sees to what is overdue."""
        for statement in after.contradictions():
            raise AssertionError(f"the table contradicts itself: it should hold that {statement}\n{after}")
        self._leases_end(before, after, now, may_end, expires)
        new = [
            (m, lease) for m, lease in after.leases.items() if m not in before.leases or before.leases[m].epoch != lease.epoch
        ]
        for member, lease in sorted(new, key=lambda pair: pair[1].epoch):
            note(f"  {member} is leased as {lease}")
            if lease.nonce:
                self._grant(member, lease, after, now)
            else:
                assert (member, lease.epoch) in self.used, f"{member} is leased to {lease}, which no daemon has told of"
        for _, lease in new:
            self.expected.leave(lease.nonce)
        self._nodes_and_queue(after, expires)
        for member, lease in after.leases.items():
            if lease.stage == "u":
                assert (member, lease.epoch) in self.used, f"{member} counts as used by {lease}; no daemon has told of that"
        for tenant in filter(None, {wish.request.tenant for wish in self.wishes.values()}):
            held, waiting = after.held_by(tenant.name), [w for w in after.queue if self.wishes[w].request.tenant == tenant]
            assert held <= tenant.max_leases, f"{tenant} holds {held} leases"
            assert len(waiting) <= tenant.max_waiting, f"{tenant} waits in {len(waiting)} places"

    def may_refuse(self, grant: Grant, keys: Keys) -> bool:
        """Whether a living daemon may refuse this grant."""
        member = f"{grant.node_id}:{grant.slot}"
        lease = keys.leases.get(member)
        if lease is None or (lease.epoch, lease.nonce) != (grant.epoch, grant.nonce):
            return True
        return grant.node_id in self.unheard or member in self.muddled or (member, grant.epoch) in self.doubtful

    def _leases_end(self, before: Keys, after: Keys, now: int, may_end: MayEnd, expires: bool) -> None:
        for member, lease in before.leases.items():
            same = after.leases.get(member)
            ended = same is None or (same.epoch, same.nonce, same.tenant) != (lease.epoch, lease.nonce, lease.tenant)
            listed = self.expected.nodes.get(_node(member))
            unfetched = lease.stage == "o" and lease.since + WAITER_TTL_MS <= now
            if ended:
                due = expires and (listed is None or unfetched)
                assert due or may_end(member, lease), f"the lease of {member} was ended without a reason: {lease}"
            elif expires and same:
                late = unfetched and same.stage == "o"
                assert not late, f"{member} is kept for a waiter that has not fetched it in time: {lease}"

    def _grant(self, member: str, lease: Lease, after: Keys, now: int) -> None:
        node = _node(member)
        wish = self.wishes[lease.nonce].request
        what = f"{member} was leased to {lease}"
        assert self.expected.alive(node, now), f"{what}; its node counts as dead"
        assert not self.expected.nodes[node].draining, f"{what}; its node is draining"
        assert self._fits(wish, node, after), f"{what}; it does not fit {wish}"
        assert lease.since == now, f"{what}; it is {now}"
        assert lease.deadline == now + (WAITER_TTL_MS if lease.stage == "o" else wish.lease_ms), (
            f"{what}, which has another end"
        )
        assert lease.tenant == (wish.tenant.name if wish.tenant else ""), f"{what} on account of another than {wish.tenant}"
        if node in self.unheard:
            self.doubtful.add((member, lease.epoch))
        elif daemon := self.daemons.get(node):
            slot = int(member.rpartition(":")[2])
            floor, in_use = daemon.slots[slot].floor, daemon.slots[slot].epoch_in_use
            assert lease.epoch > floor, f"{what}; its daemon has seen {floor}"
            assert in_use is None or member in self.muddled, f"{what}; its daemon has {in_use} in use there"
            assert not self._repeats(member, lease.epoch), f"{what}; that epoch was given out before"
        self._granted[member, lease.epoch] = (self._losses, node in self.hearing)
        leased = {lease.nonce for lease in after.leases.values()}
        for waiting in self.expected.queue:
            if waiting.nonce == lease.nonce:
                break
            passed = self.wishes[waiting.nonce].request
            fair = waiting.nonce in leased or not self._fits(passed, node, after) or _full(passed, after)
            assert fair, f"{what}; {passed} came earlier, waits, and could have used it"
        busy = not after.traits[node].idle or any(
            _node(other) == node and earlier.epoch < lease.epoch for other, earlier in after.leases.items()
        )
        for other in after.traits:
            idler = after.free_slots(other) > 0 and after.idle(other) and self._fits(wish, other, after)
            assert not (busy and idler), f"{what}; {other} is idle and would have fitted"

    def _repeats(self, member: str, epoch: int) -> bool:
        """Whether the grant repeats one, as it may not.

        A snapshot forgets grants, and so do two losses between which the daemon heard nothing. Numbers repeat then, and the
        daemon, which accepts each of them once, is the judge.
        """
        if (member, epoch) not in self._granted:
            return False
        losses, heard = self._granted[member, epoch]
        return losses == self._losses or (losses == self._losses - 1 and self._lost_all and heard)

    def _nodes_and_queue(self, after: Keys, expires: bool) -> None:
        assert set(after.nodes) == set(self.expected.nodes), f"{set(after.nodes)} are listed, not {set(self.expected.nodes)}"
        queue = [waiting.nonce for waiting in self.expected.queue]
        assert list(after.queue) == queue, f"the queue is {after.queue} and should be {queue}"
        assert not queue or len(queue) <= self.wishes[queue[0]].request.max_waiting, f"more wait than may: {queue}"
        for nonce in queue if expires else ():
            wish = self.wishes[nonce].request
            for node, traits in after.traits.items():
                useful = after.free_slots(node) and not traits.draining and self._fits(wish, node, after)
                assert not useful or _full(wish, after), f"{wish} waits while {node} has a free slot for it"

    def _denied(self, wish: Wish, denied: Denied, after: Keys, now: int) -> None:
        request, reason = wish.request, denied.reason
        taking = [traits for traits in after.traits.values() if traits.card == request.card and not traits.draining]
        fitting = [traits for traits in taking if traits.capacity >= request.tokens]
        full = _full(request, after)
        waiters = [nonce for nonce in after.queue if request.tenant and self.wishes[nonce].request.tenant == request.tenant]
        if not taking:
            right = reason is NoSlot.UNKNOWN_POOL
        elif not fitting:
            right = reason is NoSlot.TOO_LARGE
        elif wish.gives_up_ms <= now:
            right = reason is (NoSlot.TENANT_LIMIT if full else NoSlot.BUSY)
        elif request.tenant and len(waiters) >= request.tenant.max_waiting:
            right = reason is NoSlot.TENANT_LIMIT
        else:
            right = reason is NoSlot.QUEUE_FULL and len(after.queue) >= request.max_waiting
        assert right, f"{request} was denied as {reason}"
        for node, traits in after.traits.items():
            useful = after.free_slots(node) and not traits.draining and self._fits(request, node, after)
            assert not useful or full, f"{request} was denied as {reason} while {node} has a free slot for it"

    def _fits(self, wish: SlotRequest, node: str, keys: Keys) -> bool:
        traits = keys.traits[node]
        return traits.card == wish.card and traits.capacity >= wish.tokens and node not in wish.avoid


def overdue(lease: Lease, now: int) -> bool:
    """Whether a heartbeat that does not have it in use takes the lease back."""
    return lease.stage == "u" or now >= min(lease.since + LANDING_MS, lease.deadline)


def _full(wish: SlotRequest, keys: Keys) -> bool:
    return wish.tenant is not None and keys.held_by(wish.tenant.name) >= wish.tenant.max_leases


def _node(member: str) -> str:
    return member.rpartition(":")[0]
