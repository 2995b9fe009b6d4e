"""What the handoff is measured on: two stock vLLMs, one with the connector and one without, a daemon and its lease table.

Each vLLM computes with one thread, on the first core: another core is free for the sender, and both have the same.
"""

import asyncio
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import islice
from random import Random
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.wire import ask, request_bytes
from cli.ports import Ports, choose_ports, free_ports
from cli.programs import find_program, require_module
from cli.services import Places, Service, decode, redis, vllm
from cli.settings import LocalSettings
from cli.stack import MissingModelError, child_environment
from cli.supervise import Supervisor
from handoff.claim import SignedClaim, to_params
from handoff.transports import TransportName
from process.errors import ProcessError

PLAIN = "vllm-plain"
LANE = "vllm"
_ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "0"}
_IDS = range(1_000, 40_000)  # ordinary tokens of SmolLM2's vocabulary of 49,152
_ASK_TIMEOUT_S = 120.0
_SCRAPE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids that no other prompt begins with: none of them is in vLLM's prefix cache."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stack:
    """The running processes. Made by `running`."""

    settings: LocalSettings
    ports: Ports
    plain_port: int
    supervisor: Supervisor

    async def prefill(self, prompt: Prompt, *, to: str = LANE, claim: SignedClaim | None = None) -> int:
        """Have a prompt prefilled; returns when the answer with the first token was here, in monotonic nanoseconds.

        Raises ProcessError when vLLM refuses it, TimeoutError when it takes longer than two minutes.
        """
        body: dict[str, Any] = {"model": self.settings.served_model_name, "prompt": list(prompt.ids), "max_tokens": 1}
        body |= {"temperature": 0, "ignore_eos": True}
        if claim is not None:
            body["kv_transfer_params"] = to_params(claim)
        port = self.ports.vllm if to == LANE else self.plain_port
        answer = await ask(port, request_bytes(body, {}, "/v1/completions"), _ASK_TIMEOUT_S)
        if not answer.body.startswith(b"HTTP/1.1 200"):
            raise ProcessError(f"{to} did not serve a prompt of {len(prompt.ids)} tokens: {answer.body[-300:]!r}")
        return answer.pieces[-1][0]

    async def daemon_total(self, name: str) -> float:
        """Return the sum of one of the daemon's metrics."""
        return await asyncio.to_thread(_scrape, f"http://127.0.0.1:{self.ports.decode_metrics[0]}/metrics", name)

    def prefill_memory(self) -> int:
        """Bytes that the processes of the vLLM with the connector hold for themselves alone."""
        return sum(process.memory_full_info().uss for process in self._processes(LANE))

    def prefill_cpu(self, name: str) -> float:
        """Seconds of processor time that a vLLM's processes have taken so far."""
        times = [process.cpu_times() for process in self._processes(name)]
        return sum(spent.user + spent.system for spent in times)

    def _processes(self, name: str) -> list[psutil.Process]:
        server = psutil.Process(self.supervisor.pid(name))
        return [server, *server.children(recursive=True)]


class Prompts:
    """Makes prompts, all different."""

    def __init__(self, seed: int = 1) -> None:
        self._random = Random(seed)

    def next(self, tokens: int) -> Prompt:
        """Return a prompt of so many tokens."""
        return Prompt(tuple(self._random.choices(_IDS, k=tokens)))


@asynccontextmanager
async def running(settings: LocalSettings, transport: TransportName) -> AsyncIterator[Stack]:
    """Start everything; all of it is gone after the block.

    Raises ProcessError when something is missing, or does not start.
    """
    require_module("vllm", "vllm-cpu")
    if not (settings.model / "config.json").is_file():
        raise MissingModelError(f"there is no model in {settings.model}: `anchorleg model` prepares SmolLM2 there")
    ports = choose_ports(settings)
    [plain_port] = islice((port for port in free_ports() if port not in _taken(ports)), 1)
    supervisor = Supervisor(
        services(settings, ports, plain_port, transport),
        settings.logs,
        find=find_program,
        environment=child_environment(settings),
        start_timeout_s=settings.start_timeout_s,
        stop_timeout_s=settings.stop_timeout_s,
    )
    await supervisor.start()
    try:
        yield Stack(settings, ports, plain_port, supervisor)
    finally:
        await supervisor.stop()


def services(settings: LocalSettings, ports: Ports, plain_port: int, transport: TransportName) -> tuple[Service, ...]:
    """Return the processes; the vLLM without the connector starts after the other, since both starts are long and busy."""
    with_connector = vllm(settings, ports, model=settings.model, places=Places())
    without = vllm(settings, replace(ports, vllm=plain_port), model=settings.model, places=Places())
    daemon = decode(settings, ports, 0, model=settings.model, places=Places())
    choice: dict[str, str] = {"ANCHORLEG_CONNECTOR_TRANSPORT": transport, "ANCHORLEG_DAEMON_TRANSPORT": transport}
    return (
        redis(ports, Places()),
        _with(with_connector, _ONE_THREAD | choice),
        _with(daemon, choice),
        replace(_with(without, _ONE_THREAD), name=PLAIN, command=_without_connector(without.command), after=(LANE,)),
    )


def _with(service: Service, environment: Mapping[str, str]) -> Service:
    return replace(service, environment={**service.environment, **environment})


def _without_connector(command: Sequence[str]) -> tuple[str, ...]:
    at = command.index("--kv-transfer-config")
    return (*command[:at], *command[at + 2 :])


def _taken(ports: Ports) -> set[int]:
    return {number for value in vars(ports).values() for number in (value if isinstance(value, tuple) else (value,))}


def _scrape(url: str, name: str) -> float:
    with urllib.request.urlopen(url, timeout=_SCRAPE_TIMEOUT_S) as answer:
        text = answer.read().decode()
    return sum(s.value for family in text_string_to_metric_families(text) for s in family.samples if s.name == name)
