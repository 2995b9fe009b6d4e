"""`anchorleg slots` shows the lease table as it is, to people and to programs, whatever becomes of Redis."""

import asyncio
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from redis.asyncio import Redis
from typer.testing import CliRunner

from cli.main import app
from leases import LeaseTable, NodeStatus, SlotView, Tenant
from tests.kit.valkey import ValkeyProcess, acquire, grant, node, queued, register, release

LONG = "0123456789abcdef"


class Printed(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[ValkeyProcess]:
    """A server of this test's own, running and empty."""
    with ValkeyProcess(tmp_path) as process:
        yield process


def slots(redis: ValkeyProcess, *arguments: str, environment: dict[str, str] | None = None) -> Printed:
    result = CliRunner().invoke(app, ["slots", "--redis-url", redis.url, *arguments], env=environment)
    return Printed(result.exit_code, result.stdout, result.stderr)


def at(redis: ValkeyProcess, work: Callable[[LeaseTable], Awaitable[None]]) -> None:
    async def run() -> None:
        async with LeaseTable(redis.url, ttl_ms=60_000, landing_ms=60_000, timeout_s=5, holder="gateway-7") as table:
            await work(table)

    asyncio.run(run())


async def a_used_pool(table: LeaseTable) -> None:
    """Two daemons, of whose three slots one decodes, one is leased and one is free; one request was served."""
    daemon = node(f"{LONG}-1", slots=2)
    await register(table, daemon)
    await release(table, await grant(table))
    used = await grant(table, tenant=Tenant("acme"))
    busy = SlotView(slot=used.slot, floor=used.epoch, in_use=used.epoch, state="decoding")
    other = SlotView(slot=1 - used.slot, floor=0, in_use=None)
    await table.register(daemon, NodeStatus(idle=False, busy_ms=900, served=41), [busy, other])
    await register(table, node(f"{LONG}-2"))
    await grant(table)


def test_an_empty_table_is_told_in_words(redis: ValkeyProcess) -> None:
    shown = slots(redis)
    assert shown == (0, f"no decode daemon is registered at {redis.url}\n", "")


def test_each_slot_is_a_line_with_its_holder_under_the_pools_sums(redis: ValkeyProcess) -> None:
    at(redis, a_used_pool)
    status, out, err = slots(redis)
    heading, columns, *lines = out.splitlines()
    assert (status, err) == (0, "")
    assert re.fullmatch(r"smollm2   2 nodes   1 free, 2 leased   0 waiting   \d+ ms each   1 served", heading)
    assert columns.split() == ["node", "slot", "state", "age", "holder", "tenant", "served", "at"]
    first, second, third = (re.split(r"  +", line) for line in lines if line)
    assert first[:3] + first[4:] == [f"{LONG}-1", "0", "decoding", "gateway-7", "acme", "41", f"{LONG}-1.test:7001"]
    assert re.fullmatch(r"[\d.]+ m?s", first[3])
    assert second == ["", "1", "free"]
    assert third[:3] + third[4:] == [f"{LONG}-2", "0", "leased", "gateway-7", "0", f"{LONG}-2.test:7001"]


def test_ids_are_as_long_as_it_takes_to_tell_them_apart(redis: ValkeyProcess) -> None:
    async def fill(table: LeaseTable) -> None:
        for name in ("aaaaaaaaaaaa1111", "aaaaaaaaaaaa2222", "bbbbbbbbbbbbbbbb"):
            await register(table, node(name))

    at(redis, fill)
    first, second, third = (line.split()[0] for line in slots(redis).out.splitlines()[2:5])
    assert (first, second, third) == ("aaaaaaaaaaaa1", "aaaaaaaaaaaa2", "bbbbbbbbbbbbb")


def test_the_queue_is_shown_in_order(redis: ValkeyProcess) -> None:
    shown: list[Printed] = []

    async def fill(table: LeaseTable) -> None:
        await register(table, node())
        await grant(table)
        waiters = []
        for place, tenant in enumerate(("acme", "zeta"), start=1):
            waiters.append(asyncio.create_task(acquire(table, tokens=place, tenant=Tenant(tenant), wait_ms=60_000)))
            await queued(table, place)
        shown.append(await asyncio.to_thread(slots, redis, "--once"))
        for waiter in waiters:
            waiter.cancel()
        await asyncio.gather(*waiters, return_exceptions=True)

    at(redis, fill)
    lines = [line.split() for line in shown[0].out.splitlines()]
    assert "2 waiting" in shown[0].out
    place = lines.index(["waits", "tokens", "gives", "up", "in", "holder", "tenant"])
    assert (lines[place + 1][:2], lines[place + 1][-2:]) == (["1", "1"], ["gateway-7", "acme"])
    assert (lines[place + 2][:2], lines[place + 2][-2:]) == (["2", "2"], ["gateway-7", "zeta"])


def test_one_models_pool_can_be_asked_for(redis: ValkeyProcess) -> None:
    async def fill(table: LeaseTable) -> None:
        for model in ("one", "two"):
            await register(table, node(model=model))

    at(redis, fill)
    assert [pool["model"] for pool in json.loads(slots(redis, "--json").out)["pools"]] == ["one", "two"]
    assert [pool["model"] for pool in json.loads(slots(redis, "--json", "--model", "two").out)["pools"]] == ["two"]
    assert slots(redis, "--model", "six").out == f"no decode daemon of model six is registered at {redis.url}\n"
    assert json.loads(slots(redis, "--json", "--model", "six").out)["pools"] == []


def test_json_has_every_field_of_the_reports(redis: ValkeyProcess) -> None:
    at(redis, a_used_pool)
    document = json.loads(slots(redis, "--json").out)
    assert set(document) == {"redis", "time", "pools"}
    (pool,) = document["pools"]
    assert set(pool) == {"model", "free_slots", "leased_slots", "served", "mean_ms", "nodes", "queue"}
    assert (pool["model"], pool["free_slots"], pool["leased_slots"], pool["served"], pool["queue"]) == ("smollm2", 1, 2, 1, [])
    first, _ = pool["nodes"]
    ages = [slot.pop("age_ms") for slot in first["slots"]]
    epoch = first["slots"][0].pop("epoch")
    assert first == {
        "node_id": f"{LONG}-1",
        "card": "card-1",
        "decode_endpoint": f"{LONG}-1.test:7001",
        "control_host": f"{LONG}-1.test",
        "control_port": 7002,
        "capacity_tokens": 1_000,
        "idle": False,
        "busy_ms": 900,
        "draining": False,
        "served": 41,
        "slots": [
            {"slot": 0, "state": "decoding", "holder": "gateway-7", "tenant": "acme"},
            {"slot": 1, "state": "free", "epoch": None, "holder": "", "tenant": ""},
        ],
    }
    assert isinstance(ages[0], int)
    assert ages[1] is None
    assert isinstance(epoch, int)


def test_slots_of_a_draining_node_are_not_free(redis: ValkeyProcess) -> None:
    async def fill(table: LeaseTable) -> None:
        await register(table, node("a"), draining=True)

    at(redis, fill)
    assert json.loads(slots(redis, "--json").out)["pools"][0]["free_slots"] == 0
    assert "0 free, 0 leased" in slots(redis).out
    assert "a draining" in slots(redis).out


def test_a_redis_that_is_away_is_one_line_and_status_1(redis: ValkeyProcess) -> None:
    redis.stop()
    for arguments in ((), ("--json",)):
        status, out, err = slots(redis, *arguments)
        assert (status, out) == (1, "")
        assert err.startswith(f"anchorleg: lease table: inspect at {redis.socket} failed")
        assert "check that Redis runs there" in err
        assert err.count("\n") == 1


def test_the_url_comes_from_flag_environment_or_file(redis: ValkeyProcess, tmp_path: Path) -> None:
    at(redis, a_used_pool)
    file = tmp_path / "anchorleg.toml"
    file.write_text(f'redis_url = "{redis.url}"\n[gateway]\nlisten_port = 7\n')
    for arguments, environment in (
        (["--config", str(file)], {}),
        ([], {"ANCHORLEG_REDIS_URL": redis.url}),
        (["--redis-url", redis.url], {"ANCHORLEG_REDIS_URL": "redis://127.0.0.1:1/0"}),
    ):
        result = CliRunner().invoke(app, ["slots", *arguments], env=environment)
        assert result.exit_code == 0
        assert "smollm2" in result.stdout


@pytest.mark.parametrize(
    "url", ["http://user:geheim@127.0.0.1:1/0?x=y", "redis://user:geheim", "redis://user:geheim?@host", "user:geheim@host"]
)
def test_a_url_that_is_none_is_refused_without_its_password(url: str) -> None:
    result = CliRunner().invoke(app, ["slots", "--redis-url", url])
    assert result.exit_code == 2
    assert result.stderr.startswith("anchorleg: redis_url is no URL of a lease table")
    assert "geheim" not in result.stderr


def test_watching_as_json_is_a_line_each_time_through_an_absence_of_redis(redis: ValkeyProcess) -> None:
    at(redis, a_used_pool)
    command = [sys.executable, "-m", "cli.main", "slots", "--redis-url", redis.url, "--json", "--watch", "--interval", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            documents: Iterator[dict[str, Any]] = map(json.loads, process.stdout)
            assert next(documents)["pools"][0]["model"] == "smollm2"
            redis.stop()
            away = next(document for document in documents if "error" in document)
            assert "check that Redis runs there" in away["error"]
            redis.start()
            back = next(document for document in documents if "pools" in document)
            assert back["pools"] == []
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 0
            assert process.stderr is not None
            assert process.stderr.read() == ""
        finally:
            process.kill()


def test_on_a_terminal_the_view_is_renewed_in_place_until_ctrl_c(redis: ValkeyProcess) -> None:
    at(redis, a_used_pool)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "cli.main", "slots", "--redis-url", redis.url, "--interval", "0.1"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "150", "LINES": "40"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        try:
            os.close(theirs)
            screen = _Screen(ours)
            screen.read_until("1 free, 2 leased")
            at(redis, lambda table: table.unregister(node(f"{LONG}-1", slots=2)))
            screen.read_until("0 free, 1 leased")
            assert "\x1b[1A" in screen.text, "it goes back up to where it began"
            redis.stop()
            screen.read_until("Trying again every 0.1 s")
            redis.start()
            screen.read_until("no decode daemon is registered")
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 0
            screen.read_until("\x1b[?25h")  # the cursor is back
        finally:
            process.kill()
            os.close(ours)


class _Screen:
    """What has come over a terminal."""

    def __init__(self, terminal: int) -> None:
        self.text = ""
        self._terminal = terminal

    def read_until(self, wanted: str) -> None:
        seen = len(self.text)
        while wanted not in self.text[seen:]:
            try:
                self.text += os.read(self._terminal, 65_536).decode(errors="replace")
            except OSError:  # the other side is closed
                raise AssertionError(f"{wanted!r} did not come; the screen had {self.text[seen:]!r}") from None


async def test_looking_at_the_table_changes_nothing_in_it(valkey: ValkeyProcess) -> None:
    async with Redis.from_url(valkey.url) as redis, LeaseTable(valkey.url, ttl_ms=60_000, timeout_s=5) as table:
        await redis.flushall()
        await register(table, node(slots=2))
        await grant(table)
        before = {key: await redis.dump(key) for key in await redis.keys("*")}
        assert (await asyncio.to_thread(slots, valkey)).status == 0
        assert {key: await redis.dump(key) for key in await redis.keys("*")} == before
