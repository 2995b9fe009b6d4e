"""The lane without a model: real Envoy, real ext_proc and real valkey between a scripted vLLM and a scripted daemon."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import httpx

from benchmarks.fake_daemon import DaemonScript, FakeDaemon
from benchmarks.fake_vllm import FakeVllm
from benchmarks.fakes import MODEL
from cli.envoy import EnvoyConfig, render
from cli.ports import free_ports
from cli.programs import find_program
from extproc.server import Gateway, running
from gateway.settings import GatewaySettings
from leases import LeaseTable
from tests.kit.valkey import ValkeyProcess

SECRET = "a secret of the lane's tests"
MESSAGE_TIMEOUT_S = 3
LATENCY = {"x-slo-class": "latency"}


def chat(**fields: Any) -> dict[str, Any]:
    """Return a chat completion request for the scripted model."""
    return {"model": MODEL, "messages": [{"role": "user", "content": "say hello"}], "max_tokens": 16, **fields}


async def until(condition: Callable[[], bool | Awaitable[bool]], what: str, seconds: float = 10.0) -> None:
    """Wait for a condition; fails by name when it takes too long."""
    deadline = time.monotonic() + seconds
    while True:
        holds = condition()
        if isinstance(holds, bool):
            if holds:
                return
        elif await holds:
            return
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        await asyncio.sleep(0.01)


@dataclass(slots=True)
class LaneStack:
    """A running lane."""

    envoy_port: int
    admin_port: int
    internal_port: int
    extproc_port: int
    redis: ValkeyProcess
    vllm: FakeVllm
    daemon: FakeDaemon
    table: LeaseTable
    client: httpx.AsyncClient
    settings: GatewaySettings
    envoy: "subprocess.Popen[bytes]"
    gateway: Gateway | None = None  # None where ext_proc is a process of its own
    extproc: "subprocess.Popen[bytes] | None" = None
    log: list[Path] = field(default_factory=list)

    async def post(
        self, body: Any, headers: dict[str, str] | None = None, path: str = "/v1/chat/completions"
    ) -> httpx.Response:
        """Send a request; dicts as JSON, bytes as they are."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        all_headers = {"content-type": "application/json", **(LATENCY if headers is None else headers)}
        return await self.client.post(path, content=content, headers=all_headers)

    async def free_slots(self) -> int:
        """Count the pool's free slots."""
        pool = (await self.table.pools()).get(MODEL)
        return 0 if pool is None else pool.free_slots

    async def all_free(self, seconds: float = 10.0) -> None:
        """Wait until every slot is free again: nothing that a request held is left."""

        async def holds() -> bool:
            return await self.free_slots() == self.daemon.slots

        await until(holds, "every slot is free", seconds)

    def counted(self, name: str, **labels: str) -> float:
        """Return a metric's value in this process' gateway; 0 where it has never been counted."""
        assert self.gateway is not None, "ext_proc is another process here"
        return self.gateway.metrics.registry.get_sample_value(name, labels) or 0.0

    async def stats(self, pattern: str) -> dict[str, int]:
        """Return Envoy's counters whose names match a regular expression."""
        answer = await self.client.get(f"http://127.0.0.1:{self.admin_port}/stats?format=json&filter={pattern}")
        return {stat["name"]: stat["value"] for stat in answer.json()["stats"] if "name" in stat}

    def access_log(self) -> list[dict[str, Any]]:
        """Return Envoy's access log so far."""
        lines = self.log[0].read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]


@asynccontextmanager
async def lane_stack(
    folder: Path,
    *,
    own_process: bool = False,
    with_daemon: bool = True,
    configured: Callable[[str], str] = str,
    **settings: Any,
) -> AsyncIterator[LaneStack]:
    """Start everything; ext_proc in this process, or in its own where a test must kill it.

    Not `with_daemon`, its daemon is there, but does not run. `configured` makes of the rendered configuration the one that
    Envoy gets.
    """
    public, internal, admin, extproc_port = islice(free_ports(), 4)
    async with AsyncExitStack() as stack:
        redis = ValkeyProcess(folder)
        redis.start()
        stack.callback(redis.stop)
        vllm = await stack.enter_async_context(FakeVllm().running())
        daemon = FakeDaemon()
        table = await stack.enter_async_context(LeaseTable(redis.url))
        if with_daemon:
            await stack.enter_async_context(daemon.running(redis.url))
            await until(lambda: registered(table), "the daemon is registered")
        values = {
            "secret": SECRET,
            "redis_url": redis.url,
            "listen_port": extproc_port,
            "metrics_port": 0,
            "upstream_url": f"http://127.0.0.1:{internal}",
            "drain_timeout_s": 10.0 if own_process else 0.0,
            **settings,
        }
        gateway_settings = GatewaySettings.load(**values)
        gateway, process = None, None
        if own_process:
            process = start_extproc(values)
            stack.callback(stop, process)
            await until(lambda: _listens(extproc_port), "ext_proc listens", 20)
        else:
            gateway = await stack.enter_async_context(running(gateway_settings))
        config = EnvoyConfig(
            public_host="127.0.0.1",
            public_port=public,
            internal_host="127.0.0.1",
            internal_port=internal,
            admin_host="127.0.0.1",
            admin_port=admin,
            vllm=[f"127.0.0.1:{vllm.port}"],
            extproc=f"127.0.0.1:{extproc_port}",
            buffer_limit_bytes=4 << 20,
            message_timeout_s=MESSAGE_TIMEOUT_S,
        )
        rendered, log = folder / "envoy.yaml", folder / "envoy.log"
        rendered.write_text(configured(render(config)))
        envoy = start_envoy(rendered, log)
        stack.callback(stop, envoy)
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{public}", timeout=httpx.Timeout(20.0))
        )
        await until(lambda: _ready(client, admin), "Envoy is ready", 20)
        yield LaneStack(
            envoy_port=public,
            admin_port=admin,
            internal_port=internal,
            extproc_port=extproc_port,
            redis=redis,
            vllm=vllm,
            daemon=daemon,
            table=table,
            client=client,
            settings=gateway_settings,
            envoy=envoy,
            gateway=gateway,
            extproc=process,
            log=[log],
        )


def start_envoy(config: Path, log: Path) -> "subprocess.Popen[bytes]":
    """Start Envoy; its access log and its own go to one file."""
    command = [*find_program("envoy"), "-c", str(config), "--disable-hot-restart", "--log-level", "error"]
    command += ["--file-flush-interval-msec", "200"]
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)


def start_extproc(values: dict[str, Any]) -> "subprocess.Popen[bytes]":
    """Start ext_proc as a process of its own."""
    flags = [part for name, value in values.items() if name != "secret" for part in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "cli.main", "extproc", *flags]
    return subprocess.Popen(command, env={**os.environ, "ANCHORLEG_SECRET": values["secret"]}, stderr=subprocess.DEVNULL)


@asynccontextmanager
async def daemon_process(lane: LaneStack, script: DaemonScript) -> AsyncIterator["subprocess.Popen[bytes]"]:
    """A scripted daemon of its own process, for a test to kill; in the lease table when the block begins."""
    process = start_daemon(lane.redis.url, script, lane.daemon.context_tokens)
    try:
        await until(lambda: registered(lane.table), "the daemon is registered", 20)
        yield process
    finally:
        stop(process)


def start_daemon(redis_url: str, script: DaemonScript, context_tokens: int) -> "subprocess.Popen[bytes]":
    """Start a scripted daemon as a process of its own."""
    run = f"serve_daemon(sys.argv[1], {script}, slots=2, context_tokens={context_tokens})"
    code = f"import asyncio, sys; from benchmarks.fake_daemon import DaemonScript, serve_daemon; asyncio.run({run})"
    return subprocess.Popen([sys.executable, "-c", code, redis_url], cwd=Path(__file__).parents[2])


def stop(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and wait for its end."""
    process.kill()
    process.wait(10)


async def registered(table: LeaseTable) -> bool:
    """Whether a daemon is in the lease table."""
    return MODEL in await table.pools()


async def _ready(client: httpx.AsyncClient, admin: int) -> bool:
    try:
        ready = await client.get(f"http://127.0.0.1:{admin}/ready")
        return ready.status_code == 200 and (await client.get("/health")).status_code == 200
    except httpx.HTTPError:
        return False


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    await writer.wait_closed()
    return True
