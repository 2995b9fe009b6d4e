"""When a decode ends, and that every way to ask for nonsense is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decode_daemon.engine.loop import LlamaEngine
from decode_daemon.engine.protocol import (
    DecodeParams,
    Engine,
    EngineDescription,
    EngineError,
    FinishReason,
    SamplingParams,
    Step,
)

PROMPT = [5, 90, 3, 41]
FIRST = 7
CONTEXT = 64
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
