"""The lease table's nouns as arguments of its scripts, and what the scripts return as nouns; their forms are `common.lua`'s."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

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
    WaiterReport,
)
from leases.scripts import Argument, encode


def register_arguments(
    node: Node, status: NodeStatus, views: Sequence[SlotView], times_ms: tuple[int, int, int, int]
) -> list[Argument]:
    """Return what `register.lua` takes.

    Args:
        node: the daemon.
        status: of the daemon.
        views: of its slots, in their order.
        times_ms: TTL of the node, landing time of a lease, TTL of a waiter, retention of the pool.
    """
    beat = {"status": asdict(status), "slots": [{"in_use": view.in_use, "state": view.state} for view in views]}
    record = f"{json.dumps(asdict(node))}\n{json.dumps(beat)}"
    arguments: list[Argument] = [encode(node.node_id), record, encode(node.card), node.capacity_tokens]
    arguments += [int(status.idle), status.busy_ms, int(status.draining), *times_ms]
    for view in views:
        arguments += [view.floor, "" if view.in_use is None else view.in_use]
    return arguments


def read_states(reply: Sequence[int]) -> tuple[SlotState, ...]:
    """Read the reply of `register.lua`."""
    pairs = zip(reply[::2], reply[1::2], strict=True)
    return tuple(SlotState(slot, epoch, leased == 1) for slot, (epoch, leased) in enumerate(pairs))


def acquire_arguments(request: SlotRequest, wait_ms: int, waiter_ttl_ms: int, holder: str, channel: str) -> list[Argument]:
    """Return what `acquire.lua` takes; `holder` is encoded already."""
    tenant = request.tenant
    arguments: list[Argument] = [request.nonce, encode(request.card), request.tokens, request.lease_ms]
    arguments += [wait_ms, waiter_ttl_ms, request.max_waiting]
    arguments += [encode(tenant.name), tenant.max_leases, tenant.max_waiting] if tenant else ["", 0, 0]
    return [*arguments, holder, channel, ",".join(map(encode, request.avoid))]


def read_outcome(request: SlotRequest, reply: Sequence[Any]) -> Grant | Denied | None:
    """Read the reply of `acquire.lua`; None: the request waits."""
    status, *facts = reply
    if status == "granted":
        return _grant(request, *facts)
    if status == "waiting":
        return None
    return Denied(NoSlot(status), facts[0] if facts[0] >= 0 else None)


def read_view(model: str, reply: Sequence[Any]) -> PoolView:
    """Read the reply of `overview.lua`."""
    nodes, free, leased, waiting, *records = reply
    cards: dict[str, tuple[Node, ...]] = {}
    for record in records:
        node = _node(record)
        cards[node.card] = (*cards.get(node.card, ()), node)
    return PoolView(model, cards, nodes, free, leased, waiting)


def read_report(model: str, reply: Sequence[Any]) -> PoolReport:
    """Read the reply of `inspect.lua`."""
    now, (mean_ms, served), nodes, leases, wishes = reply
    held = {member: lease.split(" ") for member, lease in zip(leases[::2], leases[1::2], strict=True)}
    reports = [_node_report(record, held, now) for record in nodes[1::2]]
    return PoolReport(
        model=model,
        nodes=tuple(sorted(reports, key=lambda report: report.node.node_id)),
        queue=tuple(_waiter_report(wish, now) for wish in wishes),
        served=int(served or 0),
        mean_ms=int(mean_ms) if mean_ms else None,
    )


def _node(record: str) -> Node:
    return _read_node(record.partition("\n")[0])


@lru_cache(4096)  # the same with every grant
def _read_node(text: str) -> Node:
    return Node(**json.loads(text))


def _grant(request: SlotRequest, record: str, slot: int, epoch: int) -> Grant:
    node = _node(record)
    return Grant(
        pool=request.pool,
        node_id=node.node_id,
        slot=slot,
        epoch=epoch,
        nonce=request.nonce,
        card=node.card,
        decode_endpoint=node.decode_endpoint,
        control_host=node.control_host,
        control_port=node.control_port,
        capacity_tokens=node.capacity_tokens,
    )


def _node_report(record: str, held: dict[str, list[str]], now: int) -> NodeReport:
    node, beat = _node(record), json.loads(record.partition("\n")[2])

    def slot(number: int, said: dict[str, Any]) -> SlotReport:
        member = f"{encode(node.node_id)}:{number}"
        if member not in held:
            return SlotReport(number, said["state"], None, "", "", None)
        epoch, since, _, stage, _, tenant, holder = held[member]
        state = said["state"] if said["in_use"] == int(epoch) else {"o": "offered"}.get(stage, "leased")
        age_ms = now - int(since) if since != "0" else None
        return SlotReport(number, state, int(epoch), unquote(holder), unquote(tenant), age_ms)

    return NodeReport(
        node, NodeStatus(**beat["status"]), tuple(slot(number, said) for number, said in enumerate(beat["slots"]))
    )


def _waiter_report(wish: str, now: int) -> WaiterReport:
    _, _, tokens, _, give_up, tenant, _, holder, _, _ = wish.split(" ")
    return WaiterReport(unquote(holder), unquote(tenant), int(tokens), max(0, int(give_up) - now))
