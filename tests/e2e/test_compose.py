"""What docker-compose.yml says runs: each service's own command, environment and health check, as processes of this machine.

A container gives a service its name and its ports; here names become loopback and ports free ones. vLLM gets one more argument:
it is not to compile, which takes minutes and is no business of compose's. Nothing else is changed.
"""

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cli.compose import ENVOY_CONFIG, MODEL, PLACES
from cli.ports import choose_ports, free_ports
from cli.programs import find_program
from cli.services import envoy_config
from cli.settings import LocalSettings
from tests.kit.e2e import read
from tests.kit.lane import LATENCY, until

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]
SECRET = "a secret of the compose test"
NAMES = ("redis", "vllm", "decode", "extproc", "envoy")
UNCOMPILED = "--enforce-eager"
CAPITALS = {"Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin"}
# In bfloat16, as compose has it, only an answer without near ties is the same in both lanes: this one copies what went before.
MESSAGES = [
    {"role": role, "content": content}
    for country, city in CAPITALS.items()
    for role, content in (("user", f"Capital of {country}?"), ("assistant", f"The capital of {country} is {city}."))
] + [{"role": "user", "content": "Capital of France?"}]
PORTS = ("6379", "8001", "50061", "50062", "9465", "50051", "9464", "9470", "10000", "10001", "9901")


class Locally:
    """Turns what compose says into what this machine can run."""

    def __init__(self, model_dir: Path, folder: Path) -> None:
        self._ports = dict(zip(PORTS, map(str, islice(free_ports(), len(PORTS))), strict=True))
        self._model_dir = model_dir
        self._envoy_config = folder / "envoy.yaml"
        settings = LocalSettings.load(secret=SECRET)
        rendered = envoy_config(settings, choose_ports(settings), PLACES)
        self._envoy_config.write_text(
            re.sub(r"(port_value: )(\d+)", self._port, re.sub(r"(address: )(\S+?)(?=[,}])", self._host, rendered))
        )
        self.url = f"http://127.0.0.1:{self._ports['10000']}"

    def words(self, words: list[str]) -> list[str]:
        """Translate a command; its first two words are a program and perhaps a sub-command."""
        return [*find_program(words[0]), *words[1:2], *map(self._word, words[2:])]

    def _word(self, text: str) -> str:
        if text in (*NAMES, "0.0.0.0"):
            return "127.0.0.1"
        if text in self._ports:
            return self._ports[text]
        text = text.replace(str(MODEL), str(self._model_dir)).replace(str(ENVOY_CONFIG), str(self._envoy_config))
        text = re.sub(r'(metrics_port": )(\d+)', self._port, text.replace("0.0.0.0", "127.0.0.1"))
        return re.sub(r"(//)(\w[\w.]*)(?=:)", self._host, re.sub(r"(//[\w.]+:)(\d+)", self._port, text))

    def _host(self, match: re.Match[str]) -> str:
        return match[1] + ("127.0.0.1" if match[2] in (*NAMES, "0.0.0.0") else match[2])

    def _port(self, match: re.Match[str]) -> str:
        return match[1] + self._ports.get(match[2], match[2])


@asynccontextmanager
async def running(service: dict[str, Any], locally: Locally, log: Path) -> AsyncIterator[None]:
    """Run a service's command, healthy within the block."""
    environment = {
        name: SECRET if name == "ANCHORLEG_SECRET" else value for name, value in service.get("environment", {}).items()
    }
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *locally.words(service["command"]),
            env={**os.environ, **environment},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        await until(lambda: _healthy(service, locally, process), f"{log.stem} is healthy", 300)
        yield
        assert process.returncode is None, f"{log.stem} has ended"
    except AssertionError as error:
        error.add_note(_tail(log))
        raise
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), 20)
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _healthy(service: dict[str, Any], locally: Locally, process: asyncio.subprocess.Process) -> bool:
    assert process.returncode is None, "it has ended"
    kind, *words = service["healthcheck"]["test"]
    assert kind == "CMD"
    check = await asyncio.create_subprocess_exec(*locally.words(words), stderr=asyncio.subprocess.DEVNULL)
    if await check.wait() == 0:
        return True
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), float(service["healthcheck"]["interval"].removesuffix("s")))
    return False


def _tail(log: Path) -> str:
    return log.read_text()[-3000:]


async def test_the_services_of_compose_serve_the_lane(model_dir: Path, tmp_path: Path) -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    services["vllm"]["command"].append(UNCOMPILED)
    locally = Locally(model_dir, tmp_path)
    logs = {name: tmp_path / f"{name}.log" for name in NAMES}
    async with AsyncExitStack() as stack:

        async def start(name: str) -> None:
            await stack.enter_async_context(running(services[name], locally, logs[name]))

        await start("redis")
        async with asyncio.TaskGroup() as tasks:
            for name in ("vllm", "decode", "extproc"):
                tasks.create_task(start(name))
        await start("envoy")
        body = {"model": "smollm2", "messages": MESSAGES, "temperature": 0, "max_tokens": 16}
        async with httpx.AsyncClient(base_url=locally.url, timeout=120) as client:
            plain = await client.post("/v1/chat/completions", json=body)
            lane = await client.post("/v1/chat/completions", json=body, headers=LATENCY)
    assert lane.headers["x-slo-lane"] == "latency", lane.headers["x-slo-reason"]
    assert read(lane.json()) == read(plain.json())
