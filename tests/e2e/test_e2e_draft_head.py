"""The draft head that comes with the engine: it is SmolLM2's, and right as often as was published."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pytest
import torch

from benchmarks.engine import prompts
from benchmarks.head.corpus import Template
from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.cpu.build import library
from decode_daemon.engine.cpu.native import Library, NativeModel
from decode_daemon.engine.drafts import NgramDrafter
from decode_daemon.engine.generation import GenerationDefaults
from decode_daemon.engine.head import HeadDrafter, find
from decode_daemon.engine.head_native import NativeHead, Team
from decode_daemon.engine.loop import LlamaEngine
from decode_daemon.engine.policy import Policy, WidthCosts
from decode_daemon.engine.protocol import DecodeParams, SamplingParams
from decode_daemon.engine.speculation import Speculation
from decode_daemon.engine.weights import load_weights
from tests.kit.drafters import always

CONTEXT = 512
PUBLISHED = 0.49  # benchmarks/head/NOTES.md: first tokens that are right, of the chat prompts
COSTS = [1.0, 1.1, 1.2, 1.3, 1.5, 1.6, 1.7, 1.8]  # of a quiet machine: what is drafted shall not depend on this one


class Unmoved(WidthCosts):
    """Costs that stay what they are."""

    def observe(self, width: int, position: int, seconds: float) -> None:
        pass


class Judge(HeadDrafter):
    """Drafts nothing, and counts how often its first token would have been right."""

    judged = right = 0
    guess: int | None = None

    def saw(self, ids: Sequence[int], hidden: torch.Tensor | None) -> None:
        if self.guess is not None:
            self.judged += 1
            self.right += self.guess == ids[0]
        super().saw(ids, hidden)
        (self.guess,) = (token for token, _ in islice(self._head.drafts(self._states, self._tokens), 1))

    def draft(self, count: int) -> Sequence[int]:
        return ()

    def end(self) -> None:
        super().end()
        self.guess = None


@pytest.mark.timeout(120)
def test_the_published_head_is_right_as_often_as_published_and_changes_no_answer(model_dir: Path) -> None:
    config = LlamaConfig.read(model_dir)
    weights = load_weights(model_dir, config, torch.bfloat16)
    found = find(None, weights, config.rms_eps, torch.device("cpu"))
    assert found is not None
    team = Team.of(None, False, None)
    model = NativeModel(
        config, weights, CONTEXT, library=Library(library()), instructions=team.instructions, threads=team.threads, pin=False
    )
    head = NativeHead(found, config, team)
    judge = Judge(head)
    drafting = Speculation(model, [NgramDrafter(), HeadDrafter(head, 0.07)], Policy(Unmoved(COSTS)))
    template, stops = Template.read(model_dir), GenerationDefaults.read(model_dir).eos_token_ids
    tokens = steps = 0
    for text in prompts()["chat"]:
        prompt = template.prompt(model_dir, text)
        first = int(model.forward(torch.tensor(prompt), 0)[-1].argmax())
        params = DecodeParams(SamplingParams(0.0), 128, stops)
        plain = [
            token
            for step in LlamaEngine(model, always(model, 1, judge)).decode(prompt, first, params, never)
            for token in step.ids
        ]
        taken = list(LlamaEngine(model, drafting).decode(prompt, first, params, never))
        assert [token for step in taken for token in step.ids] == plain
        tokens, steps = tokens + len(plain), steps + len(taken)
    assert judge.judged > 200
    assert judge.right / judge.judged > PUBLISHED - 0.05
    assert tokens / steps > 1.4  # 1.51 to 1.58 published


def never() -> bool:
    return False
