"""The real stacks that the cases are sent to: Envoy, valkey, vLLM, NIXL and a decode daemon, in float32."""

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from cli.model import prepare
from cli.settings import MODEL_NAME, LocalSettings
from cli.stack import Stack
from cli.supervise import Progress
from tests.fidelity.case import chat, text
from tests.fidelity.defaults import DEFAULTS
from tests.fidelity.lanes import BothLanes
from tests.fidelity.odd import CONTEXT_TOKENS
from tests.kit.e2e import Lane
from tests.kit.lane import until

_MODEL = Path(__file__).parents[2] / ".anchorleg" / "models" / MODEL_NAME
_VLLM = ["--max-num-batched-tokens", "512", "--max-num-seqs", "16", "--enable-prompt-tokens-details"]
_PARSING = ["--enable-scale-out", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
_SLOTS = 4
_ENVIRONMENT = {
    # vLLM would compile two small functions of its sampler, for 20 s, at the first request for logprobs.
    "TORCH_COMPILE_DISABLE": "1",
    # More requests land while one is decoded: vLLM then prefills several at once.
    "ANCHORLEG_DAEMON_SLOTS": str(_SLOTS),
    # An answer that vLLM finishes because the machine was busy would say nothing about the daemon.
    **{f"ANCHORLEG_GATEWAY_{name}_TIMEOUT_S": "120" for name in ("QUEUE", "STALL", "LANDING", "RESUME")},
    "ANCHORLEG_GATEWAY_RESERVE_TIMEOUT_S": "20",
    "ANCHORLEG_GATEWAY_LEASES_TIMEOUT_S": "10",
    "ANCHORLEG_GATEWAY_LEASE_MS": "30000",
    "ANCHORLEG_GATEWAY_MAX_WAIT_MS": "60000",
    "ANCHORLEG_DAEMON_UNUSED_LEASE_S": "30",
}
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Running:
    """A running stack, and the ways to ask it."""

    lane: Lane
    both: BothLanes

    @property
    def base_url(self) -> str:
        """What an OpenAI client takes as its `base_url`."""
        return self.lane.stack.base_url

    async def resumed(self) -> float:
        """Return how many answers the daemon began and another way finished."""
        return await self.lane.metric("extproc", "anchorleg_resumed_total")

    async def quiet(self) -> None:
        """Wait until nothing is held anywhere: slots, leases, vLLM's requests and blocks."""

        async def holds_nothing() -> bool:
            states = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            held = [await self.lane.metric("vllm", f"vllm:{state}") for state in states]
            return not any(held) and await self.lane.state("free") == await self.lane.pool_free() == _SLOTS

        await until(holds_nothing, "every slot is free and vLLM holds no block", 20)


@asynccontextmanager
async def stack(folder: Path, *, report: Callable[[Progress], None] = lambda _: None) -> AsyncIterator[Running]:
    """Start the stack that most cases are for: a model without defaults of its own, no parsers."""
    async with _running(_settings(folder, _model(), _VLLM), _ENVIRONMENT, report) as running:
        yield running


@asynccontextmanager
async def parsing_stack(folder: Path, *, report: Callable[[Progress], None] = lambda _: None) -> AsyncIterator[Running]:
    """Start a stack that parses tool calls, with a model that has generation defaults."""
    settings = _settings(folder, with_defaults(_model(), folder / "model"), [*_VLLM, *_PARSING])
    async with _running(settings, {**_ENVIRONMENT, "ANCHORLEG_GATEWAY_TOOLS": "derender"}, report) as running:
        yield running


def with_defaults(model: Path, folder: Path) -> Path:
    """Make a folder of the same model with generation defaults, and return it."""
    folder.mkdir(parents=True)
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "generation_config.json").write_text(json.dumps(DEFAULTS))
    return folder


def _model() -> Path:
    prepare(_MODEL)
    return _MODEL


def _settings(folder: Path, model: Path, vllm_arg: list[str]) -> LocalSettings:
    values: dict[str, Any] = {"ports": "auto", "dtype": "float32", "eager": True, "context_tokens": CONTEXT_TOKENS}
    return LocalSettings.load(**values, model_dir=model, state_dir=folder / "state", vllm_arg=vllm_arg)


@asynccontextmanager
async def _running(
    settings: LocalSettings, environment: Mapping[str, str], report: Callable[[Progress], None]
) -> AsyncIterator[Running]:
    entered = Stack(settings, environment=environment, report=report)
    async with entered as started, _client(started.base_url) as client, _client(_root(started.base_url)) as root:
        lane = Lane(started, settings, client)
        await lane.wait_for_slots()
        both = BothLanes(root)
        # The first requests pay for kernels, connections and grammars; no case shall wait for that.
        first: dict[str, Any] = {"max_tokens": 3, "structured_outputs": {"choice": ["yes", "no"]}}
        await both.outcomes([chat("first", logprobs=True, **first), text("first", logprobs=1, **first)])
        yield Running(lane, both)


def _client(base_url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=base_url, timeout=_TIMEOUT_S, limits=limits)


def _root(base_url: str) -> str:
    return base_url.removesuffix("/v1")
