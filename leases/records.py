"""The nouns of the lease table: what daemons publish, and what gateways are given."""

from dataclasses import dataclass
from enum import StrEnum

MAX_EPOCH = 2**53
"""Lua's numbers are exact up to here; the table would never give out a higher one."""

MAX_CAPACITY_TOKENS = 2**32 - 1
"""Capacities share a sorted-set score with the idle/busy band (`common.lua`), which leaves them 32 bits."""


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
        if not self.node_id or not self.model:
            raise ValueError(f"node {self.node_id!r} of model {self.model!r}: neither name may be empty")
        if not 1 <= self.capacity_tokens <= MAX_CAPACITY_TOKENS:
            raise ValueError(
                f"node {self.node_id!r}: capacity_tokens is {self.capacity_tokens}, it must lie in 1..{MAX_CAPACITY_TOKENS}"
            )
        if self.slots < 1:
            raise ValueError(f"node {self.node_id!r}: slots is {self.slots}, a daemon needs at least one")


@dataclass(frozen=True, slots=True)
class SlotView:
    """What the daemon says of one slot in a heartbeat; where the table differs, the daemon is right."""

    slot: int
    floor: int  # highest epoch the daemon has seen or retired on this slot
    in_use: int | None  # epoch that holds the slot, from its reservation to its end; None: nobody holds it
    idle: bool  # of the whole node: no decode is running

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
class Grant:
    """A lease on one slot, and what its holder needs to reach the daemon."""

    pool: str
    node_id: str
    slot: int
    epoch: int  # fencing token: higher than that of any earlier grant in the pool
    card: str
    decode_endpoint: str  # "host:port"
    control_host: str
    control_port: int
    capacity_tokens: int


class NoSlot(StrEnum):
    """Why `acquire` had nothing to give."""

    UNKNOWN_POOL = "unknown_pool"  # no live daemon serves this model
    BUSY = "busy"  # daemons are there and one is large enough, but no fitting slot is free
    TOO_LARGE = "too_large"  # no live daemon of the pool has a slot that holds this many tokens


@dataclass(frozen=True, slots=True)
class PoolView:
    """One model's live daemons and how many of their slots are free."""

    model: str
    nodes: tuple[Node, ...]  # by node_id; never empty
    free_slots: int

    @property
    def total_slots(self) -> int:
        """Slots of all live daemons, leased ones included."""
        return sum(node.slots for node in self.nodes)

    @property
    def largest_capacity(self) -> int:
        """Tokens that the largest slot holds."""
        return max(node.capacity_tokens for node in self.nodes)

    @property
    def cards(self) -> frozenset[str]:
        """Fingerprints of the model cards; more than one only while the daemons are being replaced."""
        return frozenset(node.card for node in self.nodes)
