"""The lease table: who may use which landing slot next, kept in Redis, shared by gateways and daemons.

`LeaseTable` speaks to it, `Advertiser` keeps a daemon's slots published in it, `records` holds its nouns. The
rules stand in the Lua scripts beside them; `common.lua` describes the keys. Redis must not evict keys of this
table before their time (`maxmemory-policy noeviction`); losing all of them at once is harmless, since the
next heartbeats bring them back.
"""

from leases.advertiser import Advertiser
from leases.errors import LeasesUnavailable
from leases.records import (
    Denied,
    Grant,
    Node,
    NodeReport,
    NodeStatus,
    NoSlot,
    PoolReport,
    PoolView,
    SlotReport,
    SlotRequest,
    SlotState,
    SlotView,
    Tenant,
    WaiterReport,
)
from leases.table import LeaseTable

__all__ = [
    "Advertiser",
    "Denied",
    "Grant",
    "LeaseTable",
    "LeasesUnavailable",
    "NoSlot",
    "Node",
    "NodeReport",
    "NodeStatus",
    "PoolReport",
    "PoolView",
    "SlotReport",
    "SlotRequest",
    "SlotState",
    "SlotView",
    "Tenant",
    "WaiterReport",
]
