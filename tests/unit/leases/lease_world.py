"""What the lease table's model is made of: a clock, a client that runs on it, the table's keys as they lie, and daemons."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import redis

from decode_daemon.memory import LandingMemory
from decode_daemon.slots import LandingSlot, Occupancy
from leases import Denied, Grant, LeaseTable, Node, NodeStatus, SlotRequest, SlotState, SlotView
from leases.scripts import _SCRIPTS, Argument, pool_keys

POOL = "smollm2"
TTL_MS, LANDING_MS, WAITER_TTL_MS = 3_000, 2_500, 1_000

# Shadows `redis` in a script that is otherwise the one in use: its question for the time is answered by its last key.
_ON_OUR_CLOCK = """
local redis = setmetatable({
  call = function(name, ...)
    if name ~= 'TIME' then
      return redis.call(name, ...)
    end
    local now = tonumber(KEYS[#KEYS])
    return { math.floor(now / 1000), now % 1000 * 1000 }
  end,
}, { __index = redis })
"""
_IDLE = "0" * 14


@dataclass(slots=True)
class Clock:
    """The server's time, which passes when the test says so."""

    ms: int = 1_700_000_000_000


class ClockedServer:
    """Runs the table's scripts on a `Clock`."""

    def __init__(self, client: "redis.Redis", clock: Clock) -> None:
        self._client: Any = client
        self._clock = clock
        self._scripts = {
            name: self._client.register_script(_ON_OUR_CLOCK + text.decode()) for name, (text, _) in _SCRIPTS.items()
        }

    async def script(self, deadline: float, name: str, model: str, arguments: Sequence[Argument]) -> Any:
        return self._scripts[name](keys=[*pool_keys(model), str(self._clock.ms)], args=arguments)

    async def command(self, deadline: float, *words: str) -> Any:
        return self._client.execute_command(*words)

    async def aclose(self) -> None:
        self._client.close()


class SteppedTable(LeaseTable):
    """The client as it is, on a `Clock`, with its looks into the queue one by one instead of in `acquire`'s own rhythm."""

    def __init__(self, url: str, client: "redis.Redis", clock: Clock) -> None:
        super().__init__(url, ttl_ms=TTL_MS, landing_ms=LANDING_MS, waiter_ttl_ms=WAITER_TTL_MS, timeout_s=10)
        self._server = ClockedServer(client, clock)

    async def look(self, request: SlotRequest, left_ms: int) -> Grant | Denied | None:
        """One look of `acquire`, at whose end it gives up in `left_ms`; None: it goes on waiting."""
        return await self._ask(request, left_ms)

    async def leave(self, request: SlotRequest) -> bool:
        """What a cancelled `acquire` does; returns whether there was anything to end."""
        return await self._end(request.pool, request.nonce)


class Daemon:
    """A decode daemon's part: its landing slots are real ones, whose memory nobody writes to."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.slots = [LandingSlot(index, cast(LandingMemory, None), lambda _, __: None) for index in range(node.slots)]
        self.held: dict[int, Occupancy] = {}  # by slot
        self.reserved: dict[int, list[int]] = {slot: [] for slot in range(node.slots)}  # epochs, in order
        self.draining = False
        self.frozen = False

    def look(self) -> tuple[NodeStatus, list[SlotView]]:
        idle = not self.held
        views = [SlotView(slot.index, slot.floor, slot.epoch_in_use, slot.state) for slot in self.slots]
        return NodeStatus(idle=idle, busy_ms=0 if idle else 700 * len(self.held), draining=self.draining), views

    def hear(self, states: tuple[SlotState, ...]) -> None:
        for state in states:
            self.slots[state.slot].raise_floor(state.epoch - 1 if state.leased else state.epoch)

    async def reserve(self, slot: int, epoch: int) -> None:
        """Raises SlotRefused."""
        self.held[slot] = self.slots[slot].reserve(f"handoff-{epoch}", epoch)
        self.reserved[slot].append(epoch)

    async def finish(self, slot: int) -> int:
        """End the slot's use; returns its epoch."""
        occupancy = self.held.pop(slot)
        await self.slots[slot].release(occupancy, "done", 1)
        return occupancy.epoch


@dataclass(frozen=True, slots=True)
class Lease:
    """As it lies in the table."""

    epoch: int
    since: int
    deadline: int
    stage: str
    nonce: str
    tenant: str


@dataclass(frozen=True, slots=True)
class Traits:
    """What the table knows of a node."""

    card: str
    capacity: int
    slots: int
    idle: bool
    draining: bool
    filed: str  # under this in `ready`


@dataclass(frozen=True, slots=True)
class Keys:
    """A pool's keys at one moment, read without running any script (`common.lua` says what they mean)."""

    nodes: frozenset[str] = frozenset()
    traits: dict[str, Traits] = field(default_factory=dict)
    deadlines: dict[str, int] = field(default_factory=dict)
    sizes: frozenset[str] = frozenset()
    ready: frozenset[str] = frozenset()
    free: frozenset[str] = frozenset()
    leases: dict[str, Lease] = field(default_factory=dict)
    wishes: dict[str, str] = field(default_factory=dict)
    queue: tuple[str, ...] = ()
    tenants: frozenset[str] = frozenset()
    epoch: int | None = None

    @classmethod
    def read(cls, client: "redis.Redis") -> "Keys":
        kinds = {"nodes": dict, "traits": dict, "leases": dict, "wishes": dict, "pool": dict}
        with client.pipeline() as asked:
            for key in pool_keys(POOL):
                if key.rpartition(":")[2] in kinds:
                    asked.hgetall(key)
                else:
                    asked.zrange(key, 0, -1, withscores=True)
            nodes, traits, deadlines, sizes, ready, free, leases, wishes, queue, tenants, pool = asked.execute()
        return cls(
            nodes=frozenset(nodes),
            traits={node: _traits(text) for node, text in traits.items()},
            deadlines={name: int(score) for name, score in deadlines},
            sizes=frozenset(name for name, _ in sizes),
            ready=frozenset(name for name, _ in ready),
            free=frozenset(name for name, _ in free),
            leases={member: _lease(text) for member, text in leases.items()},
            wishes=wishes,
            queue=tuple(name for name, _ in queue),
            tenants=frozenset(name for name, _ in tenants),
            epoch=int(pool["epoch"]) if "epoch" in pool else None,
        )

    def lease_of(self, nonce: str) -> tuple[str, Lease] | None:
        """The slot ("node:slot") and lease of a wish."""
        return next(((member, lease) for member, lease in self.leases.items() if lease.nonce == nonce), None)

    def held_by(self, tenant: str) -> int:
        return sum(lease.tenant == tenant for lease in self.leases.values())

    def free_slots(self, node: str) -> int:
        return sum(member.rpartition(":")[0] == node for member in self.free)

    def idle(self, node: str) -> bool:
        """Whether neither the daemon nor the table knows of anything that it does."""
        return self.traits[node].idle and self.free_slots(node) == self.traits[node].slots

    def contradictions(self) -> list[str]:
        """What the keys say that cannot all be true."""
        slots = {f"{node}:{slot}" for node, traits in self.traits.items() for slot in range(traits.slots)}
        takers = {node: traits for node, traits in self.traits.items() if not traits.draining}
        usable = {f"{node}:{slot}" for node, traits in takers.items() for slot in range(traits.slots)}
        names = {node: f"{traits.card}/{traits.capacity:010}" for node, traits in takers.items()}
        filed = {name.rpartition("/")[2]: name for name in self.ready}
        known = {node: f"{names[node]}/{traits.filed}/{node}" for node, traits in takers.items() if traits.filed}
        waiting = {nonce for nonce, text in self.wishes.items() if text.startswith("waiting ")}
        granted = {(nonce, text) for nonce, text in self.wishes.items() if not text.startswith("waiting ")}
        due = {(lease.nonce, f"granted {lease.epoch} {member}") for member, lease in self.leases.items() if lease.nonce}
        counted = {f"{lease.tenant}/l/{member}" for member, lease in self.leases.items() if lease.tenant}
        counted |= {f"{tenant}/w/{nonce}" for nonce in waiting if (tenant := self.wishes[nonce].split(" ")[5])}
        held = max((lease.epoch for lease in self.leases.values()), default=0)
        statements = {
            "a node is known, has traits and has a deadline": self.nodes
            == set(self.traits)
            == {name[2:] for name in self.deadlines if name.startswith("n/")},
            "a leased slot is one of a known node": set(self.leases) <= slots,
            "a slot is free or leased, not both": not self.free & set(self.leases),
            "a slot is free or leased, not neither": usable <= self.free | set(self.leases),
            "a free slot is one of a node that takes requests": self.free <= usable,
            "sizes name the nodes that take requests": self.sizes == {f"{names[node]}/{node}" for node in takers},
            "ready names the nodes with free slots, once": len(filed) == len(self.ready)
            and set(filed) == {node for node in takers if self.free_slots(node)}
            and filed == known,
            "ready ranks a node as idle when it is": all(
                name.startswith(f"{names[node]}/") and (name.split("/")[2] == _IDLE) == self.idle(node)
                for node, name in filed.items()
            ),
            "those who wait are the queue": waiting == set(self.queue)
            and waiting == {name[2:] for name in self.deadlines if name.startswith("w/")},
            "a granted wish has its lease, and a lease its wish": granted == due,
            "what is offered goes on in time": {name[2:] for name in self.deadlines if name.startswith("o/")}
            == {member for member, lease in self.leases.items() if lease.stage == "o"},
            "tenants are counted as they lease and wait": self.tenants == counted,
            "no lease is above the counter": not self.leases or held <= (self.epoch or 0),
        }
        return [statement for statement, holds in statements.items() if not holds]


def _traits(text: str) -> Traits:
    card, capacity, slots, idle, _, draining, filed = text.split(" ")
    return Traits(card, int(capacity), int(slots), idle == "1", draining == "1", filed)


def _lease(text: str) -> Lease:
    epoch, since, deadline, stage, nonce, tenant, _ = text.split(" ")
    return Lease(int(epoch), int(since), int(deadline), stage, nonce, tenant)
