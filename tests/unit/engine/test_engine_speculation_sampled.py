"""With speculation on, drawn and constrained answers are those without it, seed by seed, logprobs included."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decode_daemon.engine.cpu.native import NativeModel
from decode_daemon.engine.drafts import Drafter, NgramDrafter
from decode_daemon.engine.loop import LlamaEngine
from decode_daemon.engine.protocol import DecodeParams, EngineError, FinishReason, SamplingParams
from decode_daemon.engine.sampling import distribution
from decode_daemon.grammar import Form, Grammars
from handoff.decode_pb2 import Grammar
from tests.kit.drafters import Oracle, always
from tests.kit.grammar import LETTERS, write_letters
from tests.kit.speculating import FIRST, VOCAB, answered, land, native_model, told

PROMPT = [5, 90, 3, 41]
END = LETTERS.index("<end>")
DRAWS = 2_000

SAMPLINGS = {
    "temperature": SamplingParams(1.0),
    "top-k": SamplingParams(1.5, top_k=4),
    "top-p": SamplingParams(2.0, top_p=0.7),
    "min-p": SamplingParams(1.2, min_p=0.1),
    "presence and frequency": SamplingParams(0.9, presence_penalty=1.0, frequency_penalty=0.7),
    "repetition": SamplingParams(0.9, repetition_penalty=1.4),
    "greedy penalties": SamplingParams(0.0, presence_penalty=1.0, repetition_penalty=1.2),
    "bias": SamplingParams(1.0, logit_bias={4: 8.0, 60: -100.0}),
    "allowed ids": SamplingParams(1.0, allowed_token_ids=tuple(range(3, 9))),
    "bad words": SamplingParams(1.5, allowed_token_ids=(3, 4, 5), bad_words=((3, 4), (5,), (4, 4, 3))),
    "min tokens": SamplingParams(1.0, min_tokens=12, ending_token_ids=frozenset(range(40))),
    "greedy min tokens": SamplingParams(0.0, min_tokens=12, ending_token_ids=frozenset(range(40))),
    "logprobs": SamplingParams(1.0, logprobs=3),
    "greedy logprobs": SamplingParams(0.0, logprobs=0),
    "everything": SamplingParams(
        *(1.3, 0.95, 30, 0.01),
        presence_penalty=0.3,
        frequency_penalty=-0.4,
        repetition_penalty=1.1,
        logit_bias={8: 3.0},
        allowed_token_ids=tuple(range(60)),
        bad_words=((1,), (8, 8)),
        min_tokens=5,
        ending_token_ids=frozenset({8}),
        logprobs=2,
    ),
}


@pytest.fixture
def folder(tiny: Callable[..., tuple[Path, Any]]) -> Path:
    return tiny()[0]


@pytest.fixture
def model(folder: Path) -> NativeModel:
    return native_model(folder, torch.bfloat16, "avx2")


def drafters(answer: list[int]) -> list[Drafter]:
    return [NgramDrafter(), Oracle(answer, VOCAB), Oracle(answer, VOCAB, (0,)), Oracle(answer, VOCAB, (2,))]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_with_every_option_a_seed_gives_the_same_tokens_and_logprobs(model: NativeModel, sampling: SamplingParams) -> None:
    accepted = 0
    for seed in range(3):
        params = DecodeParams(replace(sampling, seed=seed), 30, frozenset({8}), answered=seed)
        plain = answered(LlamaEngine(model), PROMPT, params)
        for drafter in drafters(plain[0]):
            for count in (1, 3, 7):
                answer, steps = told(LlamaEngine(model, always(model, count, drafter)), PROMPT, params)
                assert answer == plain
                accepted += sum(step.accepted for step in steps)
    assert accepted > 20


def test_logprobs_of_several_tokens_come_with_their_step(model: NativeModel) -> None:
    params = DecodeParams(SamplingParams(1.0, seed=4, logprobs=2), 30, frozenset())
    plain = answered(LlamaEngine(model), PROMPT, params)
    _, steps = told(LlamaEngine(model, always(model, 4, Oracle(plain[0], VOCAB))), PROMPT, params)
    assert max(len(step.ids) for step in steps) == 5
    assert all(len(step.logprobs) == len(step.ids) for step in steps)


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (Grammar.REGEX, "'([a-c]{2}|[0-9]{1,3} |xyzzy)*'"),
        (Grammar.REGEX, "'(plugh )+'"),
        (Grammar.CHOICE, "[\"'yes, please'\", \"'yes, thank you'\", \"'no'\"]"),
    ],
)
@pytest.mark.parametrize("sampling", [SamplingParams(0.0), SamplingParams(1.0, seed=2, logprobs=1)], ids=["greedy", "drawn"])
async def test_under_a_grammar_the_answer_is_the_same(
    folder: Path, model: NativeModel, kind: int, source: str, sampling: SamplingParams
) -> None:
    assert LETTERS[FIRST] == "'"
    write_letters(folder)
    grammars = Grammars(folder, VOCAB, cache_bytes=1 << 20, wait_s=5.0)
    grammars.start()

    async def params() -> DecodeParams:
        sampled = replace(sampling, ending_token_ids=frozenset({END}))
        return DecodeParams(sampled, 40, frozenset({END}), await grammars.constraint(Form(kind, source), [END]))

    plain = answered(LlamaEngine(model), PROMPT, await params())
    text = "".join(LETTERS[token] for token in plain[0])
    assert len(text) > 3
    for drafter in drafters(plain[0]):
        for count in range(1, 8):
            assert answered(LlamaEngine(model, always(model, count, drafter)), PROMPT, await params()) == plain


class Short:
    """A constraint that lets so many tokens come, then raises."""

    def __init__(self, tokens: int) -> None:
        self.left = tokens

    def mask(self) -> torch.Tensor | None:
        return None if self.left % 2 else torch.arange(VOCAB) % 2 == 0

    def accept(self, token: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise EngineError("too long")


def test_a_constraint_that_refuses_a_token_does_so_after_the_same_tokens(model: NativeModel) -> None:
    for tokens in range(1, 12):

        def params(tokens: int = tokens) -> DecodeParams:
            return DecodeParams(SamplingParams(0.8, seed=1), 30, frozenset(), Short(tokens))

        plain = answered(LlamaEngine(model), PROMPT, params())
        assert (len(plain[0]), plain[2:]) == (tokens - 1, (None, "too long"))
        for drafter in drafters([*plain[0], *PROMPT]):
            assert answered(LlamaEngine(model, always(model, 5, drafter)), PROMPT, params()) == plain


def test_an_ending_id_among_right_drafts_ends_the_answer(model: NativeModel) -> None:
    sampling = SamplingParams(1.0, seed=6)
    free = answered(LlamaEngine(model), PROMPT, DecodeParams(sampling, 30, frozenset()))[0]
    params = DecodeParams(sampling, 30, frozenset({free[4]}))
    engine = LlamaEngine(model, always(model, 7, Oracle(free, VOCAB)))
    answer, steps = told(engine, PROMPT, params)
    assert answer[0] == free[: free.index(free[4]) + 1]
    assert steps[-1].finish is FinishReason.STOP


def test_two_drawn_tokens_have_the_models_joint_distribution_whatever_is_drafted(model: NativeModel) -> None:
    sampling = SamplingParams(2.0, top_k=4)
    land(LlamaEngine(model), PROMPT)

    def exact(ids: list[int]) -> dict[int, float]:
        logits = model.forward(torch.tensor(ids), len(PROMPT))[-1]
        return {token: p for token, p in enumerate(distribution(logits, sampling).tolist()) if p > 0}

    wanted = {(one, two): p * q for one, p in exact([FIRST]).items() for two, q in exact([FIRST, one]).items()}
    likely = max(wanted, key=lambda pair: wanted[pair])
    engine = LlamaEngine(model, always(model, 1, Oracle(likely, VOCAB)))
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for seed in range(DRAWS):
        steps = list(engine.decode(PROMPT, FIRST, DecodeParams(replace(sampling, seed=seed), 3, frozenset()), lambda: False))
        counts[tuple(token for step in steps for token in step.ids)] += 1
        accepted += sum(step.accepted for step in steps)
    assert counts.keys() <= wanted.keys()
    assert 0 < accepted < DRAWS
    chi_square = sum((counts[pair] - DRAWS * p) ** 2 / (DRAWS * p) for pair, p in wanted.items())
    freedom = len(wanted) - 1
    # Mean and variance of chi-square are its degrees of freedom and twice that; four deviations above is 1 in 1,000 or less.
    assert chi_square <= freedom + 4 * math.sqrt(2 * freedom)
