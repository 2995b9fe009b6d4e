"""What drafts gain on this CPU: `python -m benchmarks.head.speed --model-dir DIR`, with prompts.toml, greedy.

Without drafts, with prompt lookup, and with prompt lookup and the draft head take turns in one process. A prompt counts with
the best of its rounds, since a busy machine only ever slows an answer down.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import torch

from benchmarks.engine import prompts
from benchmarks.head.corpus import Template
from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.cpu.cores import usable_cores
from decode_daemon.engine.drafts import NgramDrafter
from decode_daemon.engine.generation import GenerationDefaults
from decode_daemon.engine.head import HeadDrafter, draft_seconds
from decode_daemon.engine.head_native import head_for
from decode_daemon.engine.loop import LlamaEngine
from decode_daemon.engine.policy import Policy, WidthCosts, measure
from decode_daemon.engine.protocol import DecodeParams, SamplingParams
from decode_daemon.engine.speculation import Speculation
from decode_daemon.engine.steps import StepModel, choose_step
from decode_daemon.engine.weights import load_weights

_CONTEXT = 1024


class Comparison:
    """Engines over one model, whose KV cache each answer fills anew."""

    def __init__(self, model_dir: Path, dtype: torch.dtype, draft_head: Path | None) -> None:
        """Load the model; raises EngineError, also where there is no head for it."""
        config = LlamaConfig.read(model_dir)
        weights = load_weights(model_dir, config, dtype)
        self.model: StepModel = choose_step(config, weights, _CONTEXT, threads=usable_cores())
        head = head_for(self.model, weights, draft_head)
        if head is None or self.model.widest == 1:
            raise SystemExit(f"{model_dir}: no draft head for this model, or no native step on this machine")
        seconds = measure(self.model)
        self.cost = draft_seconds(head, lambda: self.model.bests((0,), 0)) / seconds[0]
        print(f"steps of 1, 2, ... rows {[round(1e3 * took, 1) for took in seconds]} ms, a drafted token {self.cost:.3f} steps")
        alone, together = WidthCosts(seconds), WidthCosts(seconds)
        drafter = HeadDrafter(head, self.cost, lambda: together.row_seconds)
        self.engines = {
            "off": LlamaEngine(self.model),
            "ngram": LlamaEngine(self.model, Speculation(self.model, [NgramDrafter()], Policy(alone))),
            "ngram and head": LlamaEngine(self.model, Speculation(self.model, [NgramDrafter(), drafter], Policy(together))),
        }
        self._stops = GenerationDefaults.read(model_dir).eos_token_ids

    def answer(self, name: str, prompt: Sequence[int], tokens: int) -> tuple[list[int], int, float]:
        """Return the greedy answer of the engine `name`, its steps, and its seconds."""
        logits = torch.empty(0)
        for start in range(0, len(prompt), self.model.widest):
            logits = self.model.forward(torch.tensor(prompt[start : start + self.model.widest]), start)
        first = int(logits[-1].argmax())
        ids: list[int] = []
        steps, began = 0, perf_counter()
        params = DecodeParams(SamplingParams(temperature=0.0), tokens, self._stops)
        for step in self.engines[name].decode(prompt, first, params, lambda: False):
            ids += step.ids
            steps += 1
        return ids, steps, perf_counter() - began


def main() -> int:
    """Print tokens a second and tokens a step; returns 1 when two engines said different things."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.head.speed", description=__doc__)
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--draft-head", type=Path, help="default: the engine's own")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    torch.set_num_threads(usable_cores())
    comparison = Comparison(options.model_dir, getattr(torch, options.dtype), options.draft_head)
    template, other = Template.read(options.model_dir), 0
    for kind, texts in prompts().items():
        told = [template.prompt(options.model_dir, text) for text in texts]
        best = {name: [float("inf")] * len(told) for name in comparison.engines}
        counts = {name: [0, 0] for name in comparison.engines}
        for _ in range(options.rounds):
            for nth, prompt in enumerate(told):
                answers = {name: comparison.answer(name, prompt, options.tokens) for name in comparison.engines}
                other += len({tuple(ids) for ids, _, _ in answers.values()}) > 1
                for name, (ids, steps, seconds) in answers.items():
                    best[name][nth] = min(best[name][nth], seconds)
                    counts[name][0] += len(ids)
                    counts[name][1] += steps
        for name in comparison.engines:
            tokens, steps = counts[name]
            seconds, ratio = sum(best[name]), sum(best["off"]) / sum(best[name])
            rate = tokens / options.rounds / seconds
            print(f"{kind:5} {name:15} {rate:6.1f} tokens/s, {ratio:.2f} x off, {tokens / steps:.2f} a step", flush=True)
    print("the same tokens" if not other else f"OTHER TOKENS in {other} answers")
    return int(other > 0)


if __name__ == "__main__":
    sys.exit(main())
