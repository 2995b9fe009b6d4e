"""vLLM's answer to the prefill leg is read, or refused: whatever it is, it is nothing else."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.endpoints import Endpoint
from gateway.reply import AnswerState, PrefillAnswer, json_writer, read_prefill_answer
from gateway.tokens import Batch
from tests.kit.chat_replies import END, IDS, script, script_for
from tests.kit.lane_replies import Lane, lane_stream, plan_of, prefill_leg
from tests.kit.scripts import Script, byte_tokenizer, card_of

JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just([1])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)


def readable(body: bytes) -> PrefillAnswer | None:
    """Fails the test on any other exception than ValueError."""
    try:
        return read_prefill_answer(Endpoint.CHAT, body)
    except ValueError:
        return None


@given(st.binary(max_size=40))
def test_bytes_that_are_no_answer_are_refused(body: bytes) -> None:
    assert readable(body) is None


@given(JSON)
def test_json_that_is_no_answer_is_refused(value: Any) -> None:
    assert readable(json.dumps(value).encode()) is None


PLACES: list[tuple[Any, ...]] = [
    *(("id",), ("created",), ("model",), ("choices",), ("usage",), ("kv_transfer_params",), ("system_fingerprint",)),
    *(("prompt_token_ids",), ("prompt_text",), ("metrics",), ("usage", "prompt_tokens")),
    *(("choices", 0), ("choices", 0, "message"), ("choices", 0, "finish_reason"), ("choices", 0, "message", "role")),
    *(("choices", 0, "logprobs"), ("choices", 0, "stop_reason"), ("choices", 0, "token_ids")),
]


@given(st.sampled_from(PLACES), JSON, st.booleans())
def test_an_answer_with_any_part_exchanged_or_missing_is_refused_or_read_and_written(
    place: tuple[Any, ...], value: Any, remove: bool
) -> None:
    leg: Any = prefill_leg(Endpoint.CHAT, {}, Script((END,)))
    target = leg
    for step in place[:-1]:
        target = target[step]
    if remove:
        del target[place[-1]]
    else:
        target[place[-1]] = value
    prefill = readable(json.dumps(leg).encode())
    if prefill is not None:
        plan = plan_of(Endpoint.CHAT, {"stream_options": {"include_usage": True}})
        state = AnswerState(card_of(byte_tokenizer()), plan, ())
        lane_stream(Lane(plan, prefill, state), [Batch((END,), "stop")])
        json_writer(plan, prefill, state).end()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b'{"choices":[]}',
        b"[" * 100_000,
        b'{"created":1e999}',
        b"\xff",
        b'{"a":' + b"9" * 5000 + b"}",
    ],
)
def test_rubbish_is_refused(raw: bytes) -> None:
    assert readable(raw) is None


@pytest.mark.parametrize("finish", ["abort", "error", "tool_calls", None, 1])
def test_a_prefill_that_did_not_end_with_its_token_is_refused(finish: Any) -> None:
    leg = prefill_leg(Endpoint.CHAT, {}, script())
    leg["choices"][0]["finish_reason"] = finish
    assert readable(json.dumps(leg).encode()) is None


def test_two_choices_are_refused() -> None:
    leg = prefill_leg(Endpoint.CHAT, {}, script())
    leg["choices"] *= 2
    assert readable(json.dumps(leg).encode()) is None


def test_an_answer_of_the_other_endpoint_is_refused() -> None:
    completion = json.dumps(prefill_leg(Endpoint.COMPLETIONS, {}, script())).encode()
    assert readable(completion) is None
    with pytest.raises(ValueError, match="has no text"):
        read_prefill_answer(Endpoint.COMPLETIONS, json.dumps(prefill_leg(Endpoint.CHAT, {}, script())).encode())


def test_logprobs_of_more_than_one_token_are_refused() -> None:
    leg = prefill_leg(Endpoint.CHAT, {"logprobs": True}, script_for(script(), {}))
    leg["choices"][0]["logprobs"]["content"] *= 2
    assert readable(json.dumps(leg).encode()) is None


@pytest.mark.parametrize(("first", "finished"), [(END, True), (IDS[0], False)])
def test_a_first_token_that_ends_the_answer_is_told_from_one_that_does_not(first: int, finished: bool) -> None:
    prefill = readable(json.dumps(prefill_leg(Endpoint.CHAT, {}, Script((first,)))).encode())
    assert prefill is not None
    assert prefill.finished is finished
