"""`anchorleg slots`: the lease table as it is now, for people in the terminal and for programs as JSON.

One JSON document is `{"redis": address, "time": UTC, "pools": [...]}` with the fields of `leases.PoolReport` in each pool,
and of `NodeReport`, `SlotReport` and `WaiterReport` in those; a node's own fields and what it said last lie side by side,
and each pool has the sums `free_slots` and `leased_slots`. When it is repeated, a line that could not be had is
`{"redis": ..., "time": ..., "error": text}`.
"""

import asyncio
import json
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import chain
from typing import Any

import typer
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from leases import LeasesUnavailable, LeaseTable, NodeReport, PoolReport, WaiterReport
from process.errors import ConfigError
from process.signals import StopSignal

TIMEOUT_S = 3.0
UNREACHABLE = 1  # exit status
WIDE = 1_000  # columns where there is no terminal: names are shown whole
_COLOURS = {"free": "green", "offered": "yellow", "leased": "yellow", "landing": "yellow", "draining": "dim"}
_OTHER_COLOUR = "cyan"
_LEAST_ID_CHARS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to show, and how."""

    url: str  # of Redis
    model: str | None = None  # None: all
    as_json: bool = False
    interval_s: float | None = None  # None: once


def show(wanted: Wanted, console: Console) -> int:
    """Print the table once, or until SIGINT or SIGTERM, and return the exit status.

    Raises:
        ConfigError: the URL is none.
    """
    return asyncio.run(_show(wanted, console))


async def _show(wanted: Wanted, console: Console) -> int:
    try:
        table = LeaseTable(wanted.url, timeout_s=TIMEOUT_S)
    except ValueError as error:
        # Without the URL: where it is cut wrong, a password is anywhere in it.
        raise ConfigError(f"redis_url is no URL of a lease table: {error}") from None
    address = _address(wanted.url)
    async with table:
        if wanted.interval_s is not None:
            await _until_stopped(_watch(table, wanted, wanted.interval_s, console))
            return 0
        try:
            pools = await _read(table, wanted.model)
        except LeasesUnavailable as error:
            typer.echo(f"anchorleg: {error}", err=True)
            return UNREACHABLE
        if wanted.as_json:
            typer.echo(document(pools, address=address))
        else:
            console.print(view(pools, address=address, model=wanted.model))
        return 0


async def _until_stopped(work: Coroutine[None, None, None]) -> None:
    async with StopSignal() as stop:
        tasks = asyncio.create_task(work), asyncio.create_task(stop.wait())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            outcome, _ = await asyncio.gather(*tasks, return_exceptions=True)
    if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):
        raise outcome


async def _watch(table: LeaseTable, wanted: Wanted, interval_s: float, console: Console) -> None:
    address = _address(wanted.url)
    in_place = console.is_terminal and not wanted.as_json
    with Live(console=console, auto_refresh=False) if in_place else nullcontext() as live:
        while True:
            picture: RenderableType
            try:
                pools = await _read(table, wanted.model)
            except LeasesUnavailable as error:
                line = _line(address, {"error": str(error)})
                picture = Text(f"{error}\nTrying again every {interval_s:g} s.", style="red")
            else:
                line = document(pools, address=address)
                picture = view(pools, address=address, model=wanted.model, height=console.height if in_place else None)
            if wanted.as_json:
                typer.echo(line)
            elif live is None:
                console.print(picture)
            else:
                live.update(picture, refresh=True)
            await asyncio.sleep(interval_s)


async def _read(table: LeaseTable, model: str | None) -> list[PoolReport]:
    return [report for name, report in (await table.inspect()).items() if model in (None, name)]


def _address(url: str) -> str:
    """The URL without user, password and options."""
    scheme, _, rest = url.partition("?")[0].partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


# --- For programs ---


def document(pools: Sequence[PoolReport], *, address: str) -> str:
    """Return the pools, from `LeaseTable.inspect`, as one line of JSON (the module says of what form)."""
    return _line(address, {"pools": [_pool_fields(pool) for pool in pools]})


def _line(address: str, content: Mapping[str, Any]) -> str:
    return json.dumps({"redis": address, "time": datetime.now(UTC).isoformat(timespec="milliseconds"), **content})


def _pool_fields(pool: PoolReport) -> dict[str, Any]:
    free, leased = _sums(pool)
    return {
        "model": pool.model,
        "free_slots": free,
        "leased_slots": leased,
        "served": pool.served,
        "mean_ms": pool.mean_ms,
        "nodes": [_node_fields(report) for report in pool.nodes],
        "queue": [asdict(waiter) for waiter in pool.queue],
    }


def _node_fields(report: NodeReport) -> dict[str, Any]:
    node = {name: value for name, value in asdict(report.node).items() if name not in ("model", "slots")}
    return {**node, **asdict(report.status), "slots": [asdict(slot) for slot in report.slots]}


def _sums(pool: PoolReport) -> tuple[int, int]:
    """How many slots are free to be given, and how many are leased."""
    slots = [(slot.epoch is not None, report.status.draining) for report in pool.nodes for slot in report.slots]
    return slots.count((False, False)), sum(leased for leased, _ in slots)


# --- For people ---


def view(pools: Sequence[PoolReport], *, address: str, model: str | None = None, height: int | None = None) -> RenderableType:
    """Draw the pools.

    Args:
        pools: from `LeaseTable.inspect`.
        address: of Redis, for when there is nothing else to show.
        model: the one that was asked for.
        height: lines there are; free slots are left out first where that is too few. None: as many as it takes.
    """
    if not pools:
        whose = f"no decode daemon of model {_plain(model)}" if model else "no decode daemon"
        return Text(f"{whose} is registered at {address}")
    names = _short([report.node.node_id for pool in pools for report in pool.nodes])
    # Around each table of slots lie its heading, the names of its columns, two lines for the queue and an empty line.
    room = None if height is None else max(3, (height - 1) // len(pools) - 5)
    return Group(*chain.from_iterable(_pool(pool, names, room) for pool in pools))


def _pool(pool: PoolReport, names: Mapping[str, str], room: int | None) -> list[RenderableType]:
    free, leased = _sums(pool)
    nodes = len(pool.nodes)
    facts = [f"{nodes} {'node' if nodes == 1 else 'nodes'}", f"{free} free, {leased} leased", f"{len(pool.queue)} waiting"]
    facts += [f"{_time(pool.mean_ms)} each" if pool.mean_ms is not None else "no time known yet", f"{pool.served} served"]
    heading = Text.assemble((_plain(pool.model), "bold"), "   ", "   ".join(facts))
    waiters = pool.queue if room is None else pool.queue[: max(1, room // 3)]
    parts: list[RenderableType] = [heading, *_slots(pool, names, None if room is None else room - len(waiters))]
    if waiters:
        parts += _queue(waiters, len(pool.queue) - len(waiters))
    return [*parts, Text()]


def _slots(pool: PoolReport, names: Mapping[str, str], room: int | None) -> list[Text]:
    rows = [(report, slot) for report in pool.nodes for slot in report.slots]
    shown = rows
    if room is not None and len(rows) > room:
        busy = [row for row in rows if row[1].state != "free"]
        shown = (busy + [row for row in rows if row[1].state == "free"])[: room - 1]
        shown.sort(key=lambda row: (row[0].node.node_id, row[1].slot))
    lines = []
    before = None
    for report, slot in shown:
        # What belongs to the node stands in the first of its lines.
        node = ("", "", "")
        if report is not before:
            status = " draining" if report.status.draining else ""
            node = names[report.node.node_id] + status, f"{report.status.served}", _plain(report.node.decode_endpoint)
        before = report
        age = "" if slot.age_ms is None else _time(slot.age_ms)
        held = (_plain(slot.state), age, _plain(slot.holder), _plain(slot.tenant))
        lines.append((node[0], f"{slot.slot}", *held, *node[1:]))
    texts = _columns(
        {"node": "<", "slot": ">", "state": "<", "age": ">", "holder": "<", "tenant": "<", "served": ">", "at": "<"}, lines
    )
    if len(shown) < len(rows):
        texts.append(Text(f"and {len(rows) - len(shown)} more slots", style="dim"))
    return texts


def _queue(waiters: Sequence[WaiterReport], more: int) -> list[Text]:
    lines = [
        (f"{place}", f"{waiter.tokens}", _time(waiter.left_ms), _plain(waiter.holder), _plain(waiter.tenant))
        for place, waiter in enumerate(waiters, start=1)
    ]
    texts = _columns({"waits": ">", "tokens": ">", "gives up in": ">", "holder": "<", "tenant": "<"}, lines)
    if more:
        texts.append(Text(f"and {more} more", style="dim"))
    return texts


def _columns(names: Mapping[str, str], lines: Sequence[tuple[str, ...]]) -> list[Text]:
    """Set lines under the names of their columns; what is too wide for the terminal is cut off at the right.

    rich's own table takes a millisecond for each row, which is ten seconds for the largest pools.
    """
    widths = [max(map(cell_len, column)) for column in zip(names, *lines, strict=True)]
    texts = []
    head = tuple(names)
    for line in (head, *lines):
        text = Text(no_wrap=True, overflow="ellipsis")
        for (name, side), cell, width in zip(names.items(), line, widths, strict=True):
            space = " " * (width - cell_len(cell))
            style = "dim" if line is head else _COLOURS.get(cell, _OTHER_COLOUR) if name == "state" else ""
            text.append(space + cell if side == ">" else cell + space, style).append("  ")
        text.rstrip()
        texts.append(text)
    return texts


def _short(ids: Iterable[str]) -> dict[str, str]:
    """As many first characters of each as it takes to tell them apart."""
    ids = set(ids)
    chars = _LEAST_ID_CHARS
    while len({one[:chars] for one in ids}) < len(ids):
        chars += 1
    return {one: _plain(one[:chars]) for one in ids}


def _time(ms: int) -> str:
    if ms < 1_000:
        return f"{ms} ms"
    seconds = ms / 1_000
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds:02} s"


def _plain(name: str | None) -> str:
    """Names come over the network: what would steer a terminal is shown as a question mark."""
    return "".join(char if char.isprintable() else "?" for char in name or "")
