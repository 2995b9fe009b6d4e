"""The reply writer: any cut of any token stream into batches is, chunk by chunk, the answer that vLLM's own classes write."""

import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gateway.endpoints import Endpoint
from gateway.tokens import Batch
from tests.kit.answers import cuts, exchanges, with_stream_options
from tests.kit.lane_replies import cut, lane_of, lane_stream, lane_whole, one_by_one, plan_of, whole_batch
from tests.kit.scripts import Script
from tests.kit.vllm_replies import untimed, vllm_stream, vllm_whole

ENDPOINTS = pytest.mark.parametrize("endpoint", list(Endpoint))


def batch_of(endpoint: Endpoint, fields: dict[str, Any], script: Script) -> Batch:
    return whole_batch(script, plan_of(endpoint, fields))


def same(ours: Any, theirs: Any) -> bool:
    """Equal, with nulls where those are, and members in the same order."""
    return json.dumps(untimed(ours)) == json.dumps(untimed(theirs))


@ENDPOINTS
def test_every_chunk_is_the_one_that_vllm_writes_for_the_same_tokens(endpoint: Endpoint) -> None:
    @settings(derandomize=True, max_examples=150)
    @given(with_stream_options(endpoint), cuts())
    def check(exchange: tuple[dict[str, Any], Script], at: list[int]) -> None:
        fields, script = exchange
        ours = lane_stream(lane_of(endpoint, fields, script), cut(batch_of(endpoint, fields, script), at))
        theirs = vllm_stream(endpoint, fields, script, at)
        assert untimed(ours) == untimed(theirs)
        assert same(ours, theirs)

    check()


@ENDPOINTS
def test_a_whole_answer_is_the_one_that_vllm_writes_for_the_same_tokens(endpoint: Endpoint) -> None:
    @settings(derandomize=True, max_examples=150)
    @given(exchanges(endpoint), cuts())
    def check(exchange: tuple[dict[str, Any], Script], at: list[int]) -> None:
        fields, script = exchange
        ours = lane_whole(lane_of(endpoint, fields, script), cut(batch_of(endpoint, fields, script), at))
        theirs = vllm_whole(endpoint, fields, script)
        assert untimed(ours) == untimed(theirs)
        assert same(ours, theirs)

    check()


def gathered(events: list[Any]) -> dict[str, Any]:
    """What a client has of a stream in the end."""
    answer: dict[str, Any] = {"text": "", "token_ids": [], "logprobs": {}, "ends": [], "usage": None}
    for event in events[:-1]:
        answer["usage"] = event.get("usage", answer["usage"])
        for choice in event["choices"]:
            answer["text"] += choice["delta"]["content"] if "delta" in choice else choice["text"]
            answer["token_ids"] += choice.get("token_ids") or []
            for name, entries in (choice["logprobs"] or {}).items():
                answer["logprobs"].setdefault(name, []).extend(entries)
            answer["ends"].append((choice["finish_reason"], choice.get("stop_reason")))
    return answer | {"ends": [end for end in answer["ends"] if end != (None, None)]}


@ENDPOINTS
def test_a_stream_holds_what_the_whole_answer_holds_for_any_cut(endpoint: Endpoint) -> None:
    @settings(derandomize=True, max_examples=100)
    @given(exchanges(endpoint), cuts())
    def check(exchange: tuple[dict[str, Any], Script], at: list[int]) -> None:
        fields, script = {**exchange[0], "return_token_ids": True}, exchange[1]
        batch = batch_of(endpoint, fields, script)
        whole = lane_whole(lane_of(endpoint, fields, script), [batch])
        (choice,) = whole["choices"]
        options = {"include_usage": True, "continuous_usage_stats": True}
        for batches in (cut(batch, at), one_by_one(batch)):
            sent = gathered(lane_stream(lane_of(endpoint, {**fields, "stream_options": options}, script), batches))
            assert sent["text"] == (choice["message"]["content"] if endpoint is Endpoint.CHAT else choice["text"])
            assert sent["token_ids"] == choice["token_ids"]
            assert sent["logprobs"] == (choice["logprobs"] or {})
            assert sent["ends"] == [(choice["finish_reason"], choice["stop_reason"])]
            assert sent["usage"]["completion_tokens"] == len(choice["token_ids"]) == whole["usage"]["completion_tokens"]

    check()


@ENDPOINTS
@settings(derandomize=True, max_examples=60)
@given(data=st.data())
def test_an_end_that_comes_after_the_last_token_ends_the_same_answer(endpoint: Endpoint, data: st.DataObject) -> None:
    fields, script = data.draw(exchanges(endpoint))
    batch = batch_of(endpoint, fields, script)
    assume(batch.finish == "length")
    late = [Batch(batch.ids, None, batch.logprobs), Batch((), "length")]
    sent = lane_stream(lane_of(endpoint, fields, script), late)
    expected = lane_stream(lane_of(endpoint, fields, script), [batch])
    assert gathered(sent) == gathered(expected)
