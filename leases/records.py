"""The nouns of the lease table: what daemons publish, what gateways ask for, and what they are given."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

MAX_EPOCH = 2**53
"""Lua's numbers are exact up to here; the table would never give out a higher one."""

MAX_CAPACITY_TOKENS = 2**32 - 1
"""Ten digits, which is how the table sorts capacities (`common.lua`)."""

MAX_TIME_MS = 24 * 3_600_000
"""No lease, wait or decode is longer than a day; a longer one is a mistaken unit."""


@dataclass(frozen=True, slots=True)
class Node:
    """One decode daemon process, as it announces itself.

    `node_id` must be new for every process start: leases of a process that is gone must not pass to its
    successor.
    """

    node_id: str
    model: str  # served model name; it is also the name of the pool
    card: str  # fingerprint of the model card
    decode_endpoint: str  # "host:port" of the gRPC decode service
    control_host: str
    control_port: int
    capacity_tokens: int  # most tokens one of its slots can hold
    slots: int  # landing slots, numbered from 0

    def __post_init__(self) -> None:
        if not self.node_id or not self.model or not self.card:
            raise ValueError(f"node {self.node_id!r} of model {self.model!r}, card {self.card!r}: no name may be empty")
        if not 1 <= self.capacity_tokens <= MAX_CAPACITY_TOKENS:
            raise ValueError(
                f"node {self.node_id!r}: capacity_tokens is {self.capacity_tokens}, it must lie in 1..{MAX_CAPACITY_TOKENS}"
            )
        if self.slots < 1:
            raise ValueError(f"node {self.node_id!r}: slots is {self.slots}, a daemon needs at least one")


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """What a daemon says of itself in a heartbeat."""

    idle: bool = True  # no slot is in use and no decode runs
    busy_ms: int = 0  # how long what runs and what waits for the engine may still take
    draining: bool = False  # finishes what it has and takes nothing new
    served: int = 0  # requests since its start, whatever their outcome

    def __post_init__(self) -> None:
        if self.busy_ms < 0 or self.served < 0:
            raise ValueError(f"busy_ms is {self.busy_ms} and served is {self.served}; neither can be below 0")


@dataclass(frozen=True, slots=True)
class SlotView:
    """What the daemon says of one slot in a heartbeat; where the table differs, the daemon is right."""

    slot: int
    floor: int  # highest epoch the daemon has seen or retired on this slot
    in_use: int | None  # epoch that holds the slot, from its reservation to its end; None: nobody holds it
    state: str = "free"  # for people: free, landing, landed, decoding or draining

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= MAX_EPOCH or not 0 <= (self.in_use or 0) <= MAX_EPOCH:
            raise ValueError(f"slot {self.slot}: epochs lie in 0..{MAX_EPOCH}, not {self.floor} and {self.in_use}")


@dataclass(frozen=True, slots=True)
class SlotState:
    """What the table says of one slot in its reply to a heartbeat.

    Leased: `epoch` is the lease that may use the slot, and every lower one is over. Free: `epoch` and every
    lower one are over. The daemon raises its floor accordingly.
    """

    slot: int
    epoch: int
    leased: bool


@dataclass(frozen=True, slots=True)
class Tenant:
    """On whose account a slot is asked for, and how much of the pool that account may take. 0: no limit."""

    name: str
    max_leases: int = 0
    max_waiting: int = 0

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("the tenant's name is empty; ask without a tenant instead")
        if self.max_leases < 0 or self.max_waiting < 0:
            raise ValueError(
                f"tenant {self.name!r}: neither {self.max_leases} leases nor {self.max_waiting} waiters can be a limit"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRequest:
    """One caller's wish for a slot.

    Asked again with the same nonce, the table returns the same grant for as long as it is the slot's lease, so
    a caller that lost the reply does not lose the slot.
    """

    pool: str  # the model
    card: str  # fingerprint of the model card that the request was planned with
    tokens: int  # how many the slot must hold, prompt and answer
    lease_ms: int  # how long the grant may go unused by the daemon; the daemon's own limit bounds it as well
    wait_ms: int = 0  # how long to stand in the pool's queue where no slot is free; 0: not at all
    max_waiting: int = 256  # how many may stand there before this one
    tenant: Tenant | None = None
    avoid: tuple[str, ...] = ()  # ids of nodes not to be given, such as one that has just refused
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))

    def __post_init__(self) -> None:
        if not self.pool or not self.card or not self.nonce:
            raise ValueError(f"pool {self.pool!r}, card {self.card!r}, nonce {self.nonce!r}: none of them may be empty")
        if not 0 <= self.tokens <= MAX_CAPACITY_TOKENS:
            raise ValueError(f"tokens is {self.tokens}, it must lie in 0..{MAX_CAPACITY_TOKENS}")
        if not 1 <= self.lease_ms <= MAX_TIME_MS:
            raise ValueError(f"lease_ms is {self.lease_ms}, it must lie in 1..{MAX_TIME_MS}")
        if not 0 <= self.wait_ms <= MAX_TIME_MS:
            raise ValueError(f"wait_ms is {self.wait_ms}, it must lie in 0..{MAX_TIME_MS}")
        if self.max_waiting < 0:
            raise ValueError(f"max_waiting is {self.max_waiting}, it cannot be below 0")


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease on one slot, and what its holder needs to reach the daemon."""

    pool: str
    node_id: str
    slot: int
    epoch: int  # fencing token: higher than that of any earlier grant in the pool
    nonce: str  # of the wish it was granted to
    card: str
    decode_endpoint: str  # "host:port"
    control_host: str
    control_port: int
    capacity_tokens: int


class NoSlot(StrEnum):
    """Why there was nothing to give."""

    UNKNOWN_POOL = "unknown_pool"  # no live daemon serves this model and card
    TOO_LARGE = "too_large"  # none of them has a slot that holds this many tokens
    BUSY = "busy"  # no fitting slot is free, or became free in time
    QUEUE_FULL = "queue_full"  # as many wait as may
    TENANT_LIMIT = "tenant_limit"  # the tenant has all that it may have


@dataclass(frozen=True, slots=True)
class Denied:
    """No slot."""

    reason: NoSlot
    retry_after_ms: int | None = None  # when one is likely to be free, by the pool's recent requests; None: not known


@dataclass(frozen=True, slots=True)
class PoolView:
    """One model's daemons, in numbers."""

    model: str
    cards: Mapping[str, tuple[Node, ...]]  # of daemons that take requests; some nodes of each, to ask for the card
    nodes: int  # live ones
    free_slots: int
    leased_slots: int
    waiting: int


@dataclass(frozen=True, slots=True)
class SlotReport:
    """One slot as the table has it."""

    slot: int
    state: str  # free, offered, leased, or what the daemon says of a slot in use
    epoch: int | None  # None: not leased
    holder: str  # who asked for it; empty where the table has forgotten
    tenant: str
    age_ms: int | None  # since the grant


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One daemon with its slots."""

    node: Node
    status: NodeStatus
    slots: tuple[SlotReport, ...]


@dataclass(frozen=True, slots=True)
class WaiterReport:
    """One place in the queue."""

    holder: str
    tenant: str
    tokens: int
    left_ms: int  # until it gives up


@dataclass(frozen=True, slots=True)
class PoolReport:
    """All of one pool."""

    model: str
    nodes: tuple[NodeReport, ...]  # by node_id
    queue: tuple[WaiterReport, ...]  # the first one is next
    served: int  # leases that ended after use, since Redis was last empty
    mean_ms: int | None  # how long recent leases were held; None: none yet
