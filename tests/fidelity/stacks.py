"""The real stacks that the cases are sent to: Envoy, valkey, vLLM, NIXL and a decode daemon; in float32, but for one."""

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
from tests.fidelity.reasoning_cases import MARKERS
from tests.kit.e2e import Lane, quiet

_MODEL = Path(__file__).parents[2] / ".anchorleg" / "models" / MODEL_NAME
_VLLM = ["--max-num-batched-tokens", "512", "--max-num-seqs", "16", "--enable-prompt-tokens-details"]
_PARSING = ["--enable-scale-out", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
_REASONING = ["--reasoning-parser", "deepseek_r1"]
_TOKENIZER, _TEMPLATE = "tokenizer.json", "chat_template.jinja"
_CLOCK = "{% if clock %}{{ strftime_now('%f') }}{% endif %}"  # six digits, so six tokens
_PATIENCE = {
    # An answer that vLLM finishes because the machine was busy would say nothing about the daemon.
    **{f"ANCHORLEG_GATEWAY_{name}_TIMEOUT_S": "120" for name in ("QUEUE", "STALL", "LANDING", "RESUME")},
    "ANCHORLEG_GATEWAY_RESERVE_TIMEOUT_S": "20",
    "ANCHORLEG_GATEWAY_LEASES_TIMEOUT_S": "10",
    "ANCHORLEG_GATEWAY_LEASE_MS": "30000",
    "ANCHORLEG_GATEWAY_MAX_WAIT_MS": "60000",
    "ANCHORLEG_DAEMON_UNUSED_LEASE_S": "30",
}
_ENVIRONMENT = {
    **_PATIENCE,
    # vLLM would compile two small functions of its sampler, for 20 s, at the first request for logprobs.
    "TORCH_COMPILE_DISABLE": "1",
    # More requests land while one is decoded: vLLM then prefills several at once.
    "ANCHORLEG_DAEMON_SLOTS": "4",
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
        await quiet(self.lane, 20)


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


@asynccontextmanager
async def reasoning_stack(folder: Path, *, report: Callable[[Progress], None] = lambda _: None) -> AsyncIterator[Running]:
    """Start a stack that parses reasoning and tool calls, with a model that has markers for thoughts."""
    settings = _settings(folder, with_markers(_model(), folder / "model"), [*_VLLM, *_PARSING, *_REASONING])
    parsers = dict.fromkeys(("ANCHORLEG_GATEWAY_TOOLS", "ANCHORLEG_GATEWAY_REASONING"), "derender")
    async with _running(settings, _ENVIRONMENT | parsers, report) as running:
        yield running


@asynccontextmanager
async def stack_as_up(folder: Path, *, report: Callable[[Progress], None] = lambda _: None) -> AsyncIterator[Running]:
    """Start a stack with the settings of `anchorleg up`: bfloat16, vLLM compiled, speculation on."""
    settings = LocalSettings.load(ports="auto", model_dir=_model(), state_dir=folder / "state")
    async with _running(settings, _PATIENCE, report) as running:
        yield running


def with_defaults(model: Path, folder: Path) -> Path:
    """Make a folder of the same model with generation defaults and a template that can read the clock, and return it."""
    template = (model / _TEMPLATE).read_text() + _CLOCK
    return _like(model, folder, {"generation_config.json": json.dumps(DEFAULTS), _TEMPLATE: template})


def with_markers(model: Path, folder: Path) -> Path:
    """Make a folder of the same model whose tokenizer calls some tokens what the parser looks for, and return it."""
    tokenizer = json.loads((model / _TOKENIZER).read_text())
    for token in tokenizer["added_tokens"]:
        if token["content"] in MARKERS:
            token |= {"content": MARKERS[token["content"]], "special": False}
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {MARKERS.get(token, token): index for token, index in vocabulary.items()}
    return _like(model, folder, {_TOKENIZER: json.dumps(tokenizer)})


def _like(model: Path, folder: Path, files: Mapping[str, str]) -> Path:
    """Make a folder of the same model but for these files, and return it."""
    folder.mkdir(parents=True)
    for file in model.iterdir():
        if file.name not in files:
            (folder / file.name).symlink_to(file)
    for name, content in files.items():
        (folder / name).write_text(content)
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
