"""When a decode ends, and that every way to ask for nonsense is refused."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.loop import LlamaEngine
from decode_daemon.engine.model import LlamaModel
from decode_daemon.engine.protocol import (
    DecodeParams,
    Engine,
    EngineDescription,
    EngineError,
    FinishReason,
    SamplingParams,
    Step,
)
from decode_daemon.engine.weights import load_weights

PROMPT = [5, 90, 3, 41]
FIRST = 7
CONTEXT = 64
VOCAB = 97
GREEDY = SamplingParams(temperature=0.0)


def params(max_tokens: int = 10, stop: frozenset[int] = frozenset(), sampling: SamplingParams = GREEDY) -> DecodeParams:
    return DecodeParams(sampling, max_tokens, stop)


def steps(engine: LlamaEngine, request: DecodeParams, prompt: list[int] = PROMPT) -> list[Step]:
    return list(engine.decode(prompt, FIRST, request, lambda: False))


def ids(answer: list[Step]) -> list[int]:
    return [token for step in answer for token in step.ids]


def test_the_engine_satisfies_the_protocol_and_describes_its_model(tiny_engine: LlamaEngine) -> None:
    engine: Engine = tiny_engine
    assert engine.describe() == EngineDescription("LlamaForCausalLM", 2, 2, 16, 97, CONTEXT, torch.float32)


@pytest.mark.parametrize("max_tokens", [2, 3, 9])
def test_max_tokens_counts_the_first_token(tiny_engine: LlamaEngine, max_tokens: int) -> None:
    answer = steps(tiny_engine, params(max_tokens))
    assert [len(step.ids) for step in answer] == [1] * (max_tokens - 1)
    assert [step.finish for step in answer] == [None] * (max_tokens - 2) + [FinishReason.LENGTH]


def test_max_tokens_one_ends_at_once_without_a_token(tiny_engine: LlamaEngine) -> None:
    assert steps(tiny_engine, params(1)) == [Step((), FinishReason.LENGTH)]


def test_a_stop_id_is_emitted_and_ends_the_answer(tiny_engine: LlamaEngine) -> None:
    free = ids(steps(tiny_engine, params(20)))
    stop = free[5]
    answer = steps(tiny_engine, params(20, frozenset({stop})))
    assert ids(answer) == free[: free.index(stop) + 1]
    assert answer[-1].finish is FinishReason.STOP


def test_a_stop_id_as_the_last_allowed_token_is_a_stop(tiny_engine: LlamaEngine) -> None:
    (second,) = ids(steps(tiny_engine, params(2)))
    assert steps(tiny_engine, params(2, frozenset({second}))) == [Step((second,), FinishReason.STOP)]


def test_a_first_token_that_is_a_stop_id_ends_at_once(tiny_engine: LlamaEngine) -> None:
    assert steps(tiny_engine, params(10, frozenset({FIRST}))) == [Step((), FinishReason.STOP)]


def test_the_context_ends_the_answer_when_it_is_full(tiny_engine: LlamaEngine) -> None:
    prompt = [1] * (CONTEXT - 4)
    answer = steps(tiny_engine, params(1000), prompt)
    assert len(prompt) + 1 + len(ids(answer)) == CONTEXT
    assert answer[-1].finish is FinishReason.LENGTH
    assert steps(tiny_engine, params(1000), [1] * (CONTEXT - 1)) == [Step((), FinishReason.LENGTH)]


def test_cancelling_between_two_steps_ends_without_a_finish(tiny_engine: LlamaEngine) -> None:
    seen: list[Step] = []
    for step in tiny_engine.decode(PROMPT, FIRST, params(50), lambda: len(seen) == 3):
        seen.append(step)
    assert [step.finish for step in seen] == [None, None, None]


def test_cancellation_is_asked_before_the_first_step(tiny_engine: LlamaEngine) -> None:
    assert list(tiny_engine.decode(PROMPT, FIRST, params(50), lambda: True)) == []


def test_a_seed_repeats_the_answer_and_another_seed_changes_it(tiny_engine: LlamaEngine) -> None:
    def sampled(seed: int) -> list[int]:
        return ids(steps(tiny_engine, params(30, sampling=SamplingParams(temperature=2.0, seed=seed))))

    assert sampled(11) == sampled(11)
    assert sampled(11) != sampled(12)


def test_an_answer_leaves_nothing_behind_for_the_next(tiny_engine: LlamaEngine) -> None:
    before = steps(tiny_engine, params(20))
    steps(tiny_engine, params(50), [9] * len(PROMPT))
    for cache in tiny_engine.kv_target(len(PROMPT)):
        cache.zero_()
    assert steps(tiny_engine, params(20)) == before


def land(engine: LlamaEngine, prompt: list[int]) -> None:
    """Fill the prompt's KV with values of its own."""
    generator = torch.Generator().manual_seed(sum(prompt))
    for cache in engine.kv_target(len(prompt)):
        cache.copy_(torch.randn(cache.shape, generator=generator))


def random_params(random: Random) -> DecodeParams:
    some_ids = [random.randrange(VOCAB) for _ in range(30)]
    answered = random.randrange(4)
    max_tokens = random.randint(1, 20)
    sampling = SamplingParams(
        temperature=random.choice([0.0, 0.7, 1.5]),
        top_p=random.choice([1.0, 0.9]),
        top_k=random.choice([0, 5]),
        min_p=random.choice([0.0, 0.05]),
        seed=random.choice([None, random.randrange(100)]),
        presence_penalty=random.choice([0.0, 1.0]),
        frequency_penalty=random.choice([0.0, -0.5]),
        repetition_penalty=random.choice([1.0, 1.3]),
        logit_bias=random.choice([{}, {some_ids[0]: 50.0}]),
        allowed_token_ids=random.choice([(), tuple(some_ids)]),
        bad_words=random.choice([(), ((some_ids[1],), (some_ids[0], some_ids[2]))]),
        min_tokens=random.randint(0, answered + max_tokens),
        ending_token_ids=frozenset(some_ids[3:6]),
        logprobs=random.choice([None, 0, 4]),
    )
    return DecodeParams(sampling, max_tokens, frozenset(some_ids[3:6]), random.choice([None, Short(9)]), answered)


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


def interrupted(engine: LlamaEngine, prompt: list[int], request: DecodeParams, random: Random) -> FinishReason | None:
    """Decode until the end, a cancellation, or a reader that leaves; return how the last step seen ended."""
    seen: list[Step] = []
    patience, attention = random.choice([0, 3, CONTEXT]), random.choice([2, CONTEXT])
    for step in engine.decode(prompt, FIRST, request, lambda: len(seen) >= patience):
        seen.append(step)
        if len(seen) == attention:
            break
    return seen[-1].finish if seen else None


def test_two_hundred_requests_of_every_kind_leave_nothing_behind(tiny_engine: LlamaEngine) -> None:
    everything = SamplingParams(1.0, top_k=30, seed=3, presence_penalty=0.5, repetition_penalty=1.2, logprobs=2)

    def answers() -> list[list[Step]]:
        land(tiny_engine, PROMPT)
        return [steps(tiny_engine, params(25, sampling=sampling)) for sampling in (GREEDY, everything)]

    random, before = Random(11), answers()
    ends: set[FinishReason | str | None] = set()
    for n in range(1, 201):
        prompt = [random.randrange(VOCAB) for _ in range(random.randint(4, 40))]
        land(tiny_engine, prompt)
        try:
            ends.add(interrupted(tiny_engine, prompt, random_params(random), random))
        except EngineError as error:
            ends.add(str(error))
        if n % 40 == 0:
            assert answers() == before
    assert ends == {None, FinishReason.STOP, FinishReason.LENGTH, "too long"}


class Watched(LlamaModel):
    """Counts how its steps were asked for."""

    def __init__(self, folder: Path) -> None:
        config = LlamaConfig.read(folder)
        super().__init__(config, load_weights(folder, config, torch.float32), CONTEXT)
        self.asked: list[str] = []

    def forward(self, ids: torch.Tensor, position: int) -> torch.Tensor:
        self.asked.append("logits")
        return super().forward(ids, position)

    def greedy(self, token: int, position: int) -> int | None:
        best = super().greedy(token, position)
        self.asked[-1] = "id"
        return best


def test_logits_leave_the_model_only_for_requests_that_need_them(tiny: Callable[..., tuple[Path, Any]]) -> None:
    model = Watched(tiny()[0])
    engine = LlamaEngine(model)
    steps(engine, params(5))
    assert model.asked == ["id"] * 4
    model.asked.clear()
    steps(engine, params(4, sampling=SamplingParams(0.0, logprobs=0)))
    assert model.asked == ["logits"] * 3
    model.asked.clear()
    steps(engine, params(6, sampling=SamplingParams(0.0, min_tokens=3, ending_token_ids=frozenset({1}))))
    assert model.asked == ["logits"] * 2 + ["id"] * 3  # the first token is one of the three


def test_each_step_carries_the_logprobs_of_its_token(tiny_engine: LlamaEngine) -> None:
    plain = steps(tiny_engine, params(8))
    answer = steps(tiny_engine, params(8, sampling=SamplingParams(0.0, logprobs=2)))
    assert ids(answer) == ids(plain)
    assert [step.finish for step in answer] == [step.finish for step in plain]
    assert all(step.logprobs == () for step in plain)
    for step in answer:
        (told,) = step.logprobs
        assert told.top_ids[0] == step.ids[0]  # greedy: the most probable one
        assert told.top_logprobs[0] == told.logprob > told.top_logprobs[1]


def test_the_kv_target_is_a_view_of_the_cache(tiny_engine: LlamaEngine) -> None:
    keys, values = tiny_engine.kv_target(5)
    assert keys.shape == values.shape == (2, 2, 5, 16)
    keys.fill_(3.0)
    values.fill_(4.0)
    wider_keys, wider_values = tiny_engine.kv_target(6)
    assert torch.equal(wider_keys[:, :, :5], keys)
    assert not wider_keys[:, :, 5].any()
    assert not wider_values[:, :, 5].any()


def test_a_damaged_cache_raises_instead_of_emitting_a_token(tiny_engine: LlamaEngine) -> None:
    tiny_engine.kv_target(len(PROMPT))[1].fill_(torch.nan)
    answer = tiny_engine.decode(PROMPT, FIRST, params(), lambda: False)
    with pytest.raises(EngineError, match="not finite"):
        next(answer)


@pytest.mark.parametrize(
    ("prompt", "first", "request_params", "message"),
    [
        (PROMPT, 97, params(), "first token 97"),
        (PROMPT, -1, params(), "first token -1"),
        ([1, 97], 1, params(), "prompt token 97"),
        ([1, -3], 1, params(), "prompt token -3"),
        ([1] * CONTEXT, 1, params(), "prompt of 64 tokens"),
        (PROMPT, 1, params(0), "max_tokens is 0"),
        (PROMPT, 1, params(sampling=SamplingParams(-1.0)), "temperature is -1.0"),
        (PROMPT, 1, params(sampling=SamplingParams(1.0, allowed_token_ids=(97,))), "allowed_token_ids has id 97"),
        (PROMPT, 1, DecodeParams(GREEDY, 5, frozenset(), answered=5), "answered is 5"),
    ],
)
def test_arguments_out_of_range_are_refused_at_the_call(
    tiny_engine: LlamaEngine, prompt: list[int], first: int, request_params: DecodeParams, message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        tiny_engine.decode(prompt, first, request_params, lambda: False)


@pytest.mark.parametrize("tokens", [0, CONTEXT + 1])
def test_a_kv_target_outside_the_context_is_refused(tiny_engine: LlamaEngine, tokens: int) -> None:
    with pytest.raises(EngineError, match="context of 64 tokens"):
        tiny_engine.kv_target(tokens)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_tokens": 257}, "context_tokens is 257.*max_position_embeddings"),
        ({"context_tokens": 0}, "context_tokens is 0"),
        ({"dtype": torch.float16}, "torch.float16"),
    ],
)
def test_a_load_the_engine_cannot_run_is_refused(
    tiny: Callable[..., tuple[Path, Any]], options: dict[str, Any], message: str
) -> None:
    folder, _ = tiny()
    wanted: dict[str, Any] = {"dtype": torch.float32, "context_tokens": 64, "threads": 2} | options
    with pytest.raises(EngineError, match=message):
        LlamaEngine.load(folder, **wanted)
