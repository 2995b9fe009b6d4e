"""What one user gets from the engine on this machine: a step by context and width, and speculation on three kinds of prompts.

All that is compared takes turns, so that a busy machine slows all of it; each figure is the median of the rounds. The limit is
the rate at which the same cores read memory in the same round.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks.bandwidth import Reader
from benchmarks.gpu.shapes import step_bytes
from benchmarks.report import Measure
from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.cpu.cores import usable_cores
from decode_daemon.engine.generation import GenerationDefaults
from decode_daemon.engine.head_native import head_for
from decode_daemon.engine.loop import LlamaEngine
from decode_daemon.engine.protocol import DecodeParams, SamplingParams
from decode_daemon.engine.speculation import Speculation
from decode_daemon.engine.steps import StepModel, choose_step
from decode_daemon.engine.weights import load_weights

CONTEXTS = (128, 1024, 4000)
WIDTHS = (1, 2, 4, 8)
KINDS = ("chat", "code", "copy")
ANSWER_TOKENS = 128
_STEPS = 16  # of one sample
_ROOM = 96  # positions behind the longest context for the steps that are timed
_PREFILL_WIDTH = 8


@dataclass(frozen=True, slots=True)
class Decoded:
    """One answer."""

    ids: tuple[int, ...]
    cycles: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Rig:
    """The loaded engine, and what its steps have to read."""

    model: StepModel
    engine: LlamaEngine
    threads: int
    stops: frozenset[int]

    @classmethod
    def load(cls, model_dir: Path, *, threads: int | None = None) -> "Rig":
        """Load a model in bfloat16; raises EngineError."""
        config = LlamaConfig.read(model_dir)
        context = min(config.max_positions, CONTEXTS[-1] + _ROOM)
        weights = load_weights(model_dir, config, torch.bfloat16)
        threads = threads or usable_cores()
        model = choose_step(config, weights, context, threads=threads)
        engine = LlamaEngine(model, Speculation.of("auto", model, head_for(model, weights, threads=threads)))
        return cls(model, engine, threads, GenerationDefaults.read(model_dir).eos_token_ids)

    def contexts(self) -> tuple[int, ...]:
        """Return the contexts that are measured: those the model has room for."""
        return tuple(context for context in CONTEXTS if context + _ROOM <= self.model.context_tokens)

    def step_seconds(self, context: int, width: int = 1) -> float:
        """Return the time of one step, the mean of a few in a row."""
        ids = range(1, width + 1)
        self.model.bests(ids, context)
        began = perf_counter()
        for _ in range(_STEPS):
            self.model.bests(ids, context)
        return (perf_counter() - began) / _STEPS

    def answer(self, prompt: Sequence[int], *, speculate: bool) -> Decoded:
        """Decode greedily after a prompt whose KV is computed here."""
        logits = torch.empty(0)
        for start in range(0, len(prompt), _PREFILL_WIDTH):
            logits = self.model.forward(torch.tensor(prompt[start : start + _PREFILL_WIDTH]), start)
        params = DecodeParams(SamplingParams(temperature=0.0), ANSWER_TOKENS, self.stops, speculate=speculate)
        ids: list[int] = []
        cycles, began = 0, perf_counter()
        for step in self.engine.decode(prompt, int(logits[-1].argmax()), params, lambda: False):
            ids += step.ids
            cycles += 1
        return Decoded(tuple(ids), cycles, perf_counter() - began)


def prompts() -> dict[str, list[str]]:
    """Return the prompts of benchmarks/prompts.toml by kind."""
    table: dict[str, list[str]] = tomllib.loads(files("benchmarks").joinpath("prompts.toml").read_text(encoding="utf-8"))
    return table


def measure(model_dir: Path, *, rounds: int = 5, threads: int | None = None) -> list[Measure]:
    """Take every measure of the engine alone; raises EngineError for a model that it cannot run."""
    rig = Rig.load(model_dir, threads=threads)
    return [*step_measures(rig, rounds), *width_measures(rig, rounds), *speculation_measures(rig, model_dir, rounds)]


def step_measures(rig: Rig, rounds: int) -> Iterator[Measure]:
    """Yield the time of a step at each context, and its share of the bandwidth."""
    reader = Reader(rig.threads)
    rates: list[float] = []
    times: dict[int, list[float]] = {context: [] for context in rig.contexts()}
    shares: dict[int, list[float]] = {context: [] for context in rig.contexts()}
    for _ in range(rounds):
        rates.append(reader.bytes_per_second())
        for context in times:
            times[context].append(rig.step_seconds(context))
            shares[context].append(_bytes(rig, context) / times[context][-1] / rates[-1])
    yield Measure("read_gb_per_s", median(rates) / 1e9, "GB/s", f"{rig.threads} threads read memory and do nothing else")
    for context, taken in times.items():
        how = f"{_bytes(rig, context) / 1e6:,.0f} MB of weights and KV cache"
        yield Measure(f"step_at_{context}_ms", median(taken) * 1e3, "ms", how)
        yield Measure(f"bandwidth_at_{context}", median(shares[context]) * 100, "%", "of the rate read in the same round")


def width_measures(rig: Rig, rounds: int) -> Iterator[Measure]:
    """Yield what a step of several rows costs over a step of one."""
    context = rig.contexts()[0]
    taken = {width: [rig.step_seconds(context, width) for _ in range(rounds)] for width in WIDTHS}
    for width in WIDTHS[1:]:
        ratios = [wide / one for wide, one in zip(taken[width], taken[1], strict=True)]
        yield Measure(f"width_{width}_over_1", median(ratios), "x", f"{median(taken[width]) * 1e3:.1f} ms for {width} rows")


def speculation_measures(rig: Rig, model_dir: Path, rounds: int) -> Iterator[Measure]:
    """Yield tokens a second with and without speculation for each kind of prompt."""
    for kind, texts in prompts().items():
        encoded = [_encoded(model_dir, text) for text in texts]
        runs: dict[bool, list[list[Decoded]]] = {False: [], True: []}
        for _ in range(max(1, rounds // 2)):
            for speculate in runs:
                runs[speculate].append([rig.answer(prompt, speculate=speculate) for prompt in encoded])
        rate = {speculate: median(_tokens_per_second(run) for run in taken) for speculate, taken in runs.items()}
        same = len({tuple(answer.ids for answer in run) for taken in runs.values() for run in taken}) == 1
        tau = _per_cycle(runs[True][0])
        yield Measure(f"{kind}_tokens_per_s", rate[False], "/s", "without speculation")
        how = f"{tau:.2f} tokens a cycle; {'the same tokens' if same else 'OTHER TOKENS'}"
        yield Measure(f"{kind}_speculating_tokens_per_s", rate[True], "/s", how)
        yield Measure(f"{kind}_speculation_gain", rate[True] / rate[False], "x", f"{len(texts)} prompts, greedy")


def _tokens_per_second(run: Sequence[Decoded]) -> float:
    return sum(len(answer.ids) for answer in run) / sum(answer.seconds for answer in run)


def _per_cycle(run: Sequence[Decoded]) -> float:
    return sum(len(answer.ids) for answer in run) / sum(answer.cycles for answer in run)


def _bytes(rig: Rig, context: int) -> int:
    return step_bytes(rig.model.config, context)


def _encoded(model_dir: Path, text: str) -> list[int]:
    messages: list[Mapping[str, str]] = [{"role": "user", "content": text}]
    return list(_tokenizer(model_dir).apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


@cache
def _tokenizer(model_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir)
