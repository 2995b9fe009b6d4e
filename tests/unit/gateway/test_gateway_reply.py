"""The client's chat answer, judged by the openai client's types and by vLLM's own classes."""

import json
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from gateway.endpoints import Endpoint
from gateway.errors import UpstreamFailed
from gateway.reply import stream_writer
from gateway.tokens import Batch
from tests.kit.chat_replies import END, IDS, TEXT, TURN, fields_of, lane_from, listed, script, script_for
from tests.kit.gateway import ids_of
from tests.kit.lane_replies import cut, lane_of, lane_stream, lane_whole, one_by_one, prefill_leg, whole_batch
from tests.kit.scripts import Script, byte_tokenizer
from tests.kit.vllm_replies import parsed, untimed, vllm_stream, vllm_whole

USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
CONTINUOUS: dict[str, Any] = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def stream(told: Script | None = None, **fields: Any) -> list[Any]:
    """All events of an answer in three batches."""
    told = told or script()
    lane = lane_of(Endpoint.CHAT, fields_of(told, **fields), told)
    return lane_stream(lane, cut(whole_batch(told, lane.plan), (1, len(IDS))))


def whole(told: Script | None = None, **fields: Any) -> Any:
    told = told or script()
    lane = lane_of(Endpoint.CHAT, fields_of(told, **fields), told)
    return lane_whole(lane, cut(whole_batch(told, lane.plan), (1, len(IDS))))


def typed(events: list[Any]) -> list[ChatCompletionChunk]:
    return [ChatCompletionChunk.model_validate(event) for event in events if event != "[DONE]"]


@pytest.mark.parametrize(("ending", "finish"), [(END, "stop"), (None, "length")])
@pytest.mark.parametrize("options", [{}, USAGE, CONTINUOUS])
def test_a_stream_is_one_answer(ending: int | None, finish: str, options: dict[str, Any]) -> None:
    sent = stream(script(ending), **options)
    chunks = typed(sent)
    assert sent.count("[DONE]") == 1
    assert sent[-1] == "[DONE]"
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert [choice.delta.role for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + [finish]
    assert "".join(choice.delta.content or "" for choice in choices) == TEXT


def test_id_created_model_and_fingerprint_are_those_of_vllms_answer_to_the_prefill_leg() -> None:
    leg = prefill_leg(Endpoint.CHAT, {}, script()) | {"id": "chatcmpl-7", "created": 1_700_000_000, "model": "other"}
    lane = lane_from(leg)
    first, *_, last, _ = lane_stream(lane, one_by_one(whole_batch(script(), lane.plan)))
    for chunk in (first, last):
        assert (chunk["id"], chunk["created"], chunk["model"]) == ("chatcmpl-7", 1_700_000_000, "other")
    assert last["system_fingerprint"] == "fp-1"


@pytest.mark.parametrize(("ending", "finish"), [(END, "stop"), (None, "length")])
def test_usage_comes_once_without_choices_before_done_and_counts_the_handoff_token(ending: int | None, finish: str) -> None:
    *others, last = typed(stream(script(ending), **USAGE))
    assert all(chunk.usage is None for chunk in others)
    assert last.choices == []
    assert last.usage is not None
    tokens, prompt = len(script(ending).ids), len(script().prompt)
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (prompt, tokens)
    assert last.usage.total_tokens == prompt + tokens
    assert last.usage.prompt_tokens_details is not None
    assert last.usage.prompt_tokens_details.cached_tokens == 0


def test_no_usage_unless_asked_for() -> None:
    assert all("usage" not in event for event in stream()[:-1])
    assert all("usage" not in event for event in stream(stream_options={"include_usage": False})[:-1])


def test_usage_in_every_chunk_counts_the_tokens_so_far() -> None:
    counts = [event["usage"]["completion_tokens"] for event in stream(**CONTINUOUS)[:-1]]
    assert counts == [0, 1, len(IDS), len(IDS) + 1, len(IDS) + 1]


COMBINATIONS = list(
    product(
        [{}, USAGE, CONTINUOUS],
        [{}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 2}],
        [{}, {"return_token_ids": True}],
        [{}, {"stop": "née"}, {"stop": ["left", "zzzz"], "include_stop_str_in_output": True}],
    )
)


@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda parts: str({k: v for part in parts for k, v in part.items()}))
def test_every_combination_is_written_as_vllm_writes_it(combination: tuple[dict[str, Any], ...]) -> None:
    fields = {name: value for part in combination for name, value in part.items()}
    for told in (script(), script(None, fingerprint=None), script(TURN)):
        told = told if fields.get("logprobs") else Script(told.ids, fingerprint=told.fingerprint)
        told = script_for(told, fields)
        asked = fields_of(told, **fields)
        lane = lane_of(Endpoint.CHAT, asked, told)
        sent = lane_stream(lane, one_by_one(whole_batch(told, lane.plan)))
        assert listed(sent) == listed(vllm_stream(Endpoint.CHAT, asked, told))
        asked.pop("stream_options", None)
        lane = lane_of(Endpoint.CHAT, asked, told)
        answer = lane_whole(lane, one_by_one(whole_batch(told, lane.plan)))
        assert listed(answer) == listed(vllm_whole(Endpoint.CHAT, asked, told))


def test_a_whole_answer_is_one_that_the_openai_client_reads() -> None:
    parsed_answer = ChatCompletion.model_validate(whole(logprobs=True, top_logprobs=2))
    (choice,) = parsed_answer.choices
    assert choice.message.content == TEXT
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    assert len(choice.logprobs.content or ()) == len(IDS) + 1


def test_the_client_sees_nothing_of_the_handoff() -> None:
    assert prefill_leg(Endpoint.CHAT, {}, script())["kv_transfer_params"] is not None
    assert whole()["kv_transfer_params"] is None
    assert all("kv_transfer_params" not in event for event in stream()[:-1])


def test_what_else_vllm_says_in_its_answer_is_passed_on() -> None:
    leg = prefill_leg(Endpoint.CHAT, {}, script()) | {"new": {"field": [1, None]}}
    leg["choices"][0]["new"] = leg["choices"][0]["message"]["new"] = leg["usage"]["new"] = 1
    lane = lane_from(leg)
    answer = lane_whole(lane, one_by_one(whole_batch(script(), lane.plan)))
    assert answer["new"] == {"field": [1, None]}
    assert [answer["choices"][0]["new"], answer["choices"][0]["message"]["new"], answer["usage"]["new"]] == [1, 1, 1]


def test_token_ids_are_shown_only_where_they_are_asked_for() -> None:
    # The gateway may have asked the prefill leg for them all the same.
    leg = prefill_leg(Endpoint.CHAT, {"return_token_ids": True}, script())
    lane = lane_from(leg)
    answer = lane_whole(lane, one_by_one(whole_batch(script(), lane.plan)))
    assert (answer["prompt_token_ids"], answer["choices"][0]["token_ids"]) == (None, None)


def test_the_prompts_text_is_in_the_first_chunk_where_it_is_asked_for() -> None:
    first, second, *_ = stream(return_prompt_text=True)
    assert first["prompt_text"] == script().prompt_text
    assert "prompt_text" not in second
    assert stream()[0]["prompt_text"] is None


@pytest.mark.parametrize(
    ("ending", "fields", "reason"),
    [
        (END, {}, None),
        (TURN, {}, TURN),
        (TURN, {"stop_token_ids": [TURN]}, TURN),
        (END, {"stop_token_ids": [END]}, None),
        (END, {"stop_token_ids": [END], "ignore_eos": True}, END),
        (TURN, {"stop_token_ids": [TURN], "ignore_eos": True}, TURN),
    ],
)
def test_a_stop_id_is_named_unless_it_is_the_tokenizers_own_end(
    ending: int, fields: dict[str, Any], reason: int | None
) -> None:
    answer = whole(script(ending), **fields)
    assert (answer["choices"][0]["finish_reason"], answer["choices"][0]["stop_reason"]) == ("stop", reason)
    assert untimed(answer) == untimed(vllm_whole(Endpoint.CHAT, fields_of(script(ending), **fields), script(ending)))


def test_a_first_token_that_ends_the_answer_is_the_whole_of_it() -> None:
    told = Script((END,))
    lane = lane_of(Endpoint.CHAT, {}, told)
    assert lane.prefill.finished
    sent = lane_stream(lane, [Batch((END,), "stop")])
    assert listed(sent) == listed(vllm_stream(Endpoint.CHAT, {}, told))


def test_a_stop_string_wins_over_the_limit_at_the_same_token() -> None:
    ids = tuple(ids_of("stop here"))
    answer = whole(Script(ids), stop="here")
    choice = answer["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("stop ", "stop", "here")


def test_an_error_in_mid_stream_is_one_event_and_no_done_follows() -> None:
    lane = lane_of(Endpoint.CHAT, {}, script())
    writer = stream_writer(lane.plan, lane.prefill, lane.state)
    message = 'Traceback:\n  File "x"\r\n\n\ndata: [DONE]\n\n🙂'
    sent = parsed(writer.begin() + writer.write(Batch(IDS[:1])) + writer.fail(UpstreamFailed(message, code="decode_lost")))
    assert len(sent) == 3
    assert sent[-1]["error"] == {"message": message, "type": "upstream_error", "param": None, "code": "decode_lost"}


@given(st.text(), st.text())
def test_any_error_is_one_line(message: str, code: str) -> None:
    error = UpstreamFailed(message, code=code)
    assert b"\n" not in error.body()
    assert b"\r" not in error.body()
    assert json.loads(error.body())["error"]["message"] == message


def test_the_requests_times_are_told_where_vllm_tells_them() -> None:
    told = {
        "time_to_first_token_ms": 40.0,
        "generation_time_ms": 0.0,
        "queue_time_ms": 2.0,
        "mean_itl_ms": None,
        "tokens_per_second": 25.0,
        "speculative_decoding": None,
    }
    leg = prefill_leg(Endpoint.CHAT, {}, script()) | {"metrics": told}
    lane = lane_from(leg, **USAGE)
    usage = lane_stream(lane, one_by_one(whole_batch(script(), lane.plan)))[-2]
    metrics = usage["metrics"]
    assert metrics["generation_time_ms"] > 0
    assert metrics["mean_itl_ms"] == pytest.approx(metrics["generation_time_ms"] / len(IDS))
    seconds = (40.0 + metrics["generation_time_ms"]) / 1000
    assert metrics["tokens_per_second"] == pytest.approx((len(IDS) + 1) / seconds)
    assert (metrics["time_to_first_token_ms"], metrics["queue_time_ms"]) == (40.0, 2.0)
    lane = lane_from(leg)
    answer = lane_whole(lane, [Batch((END,), "stop")])
    assert answer["metrics"] == {**told, "tokens_per_second": 25.0}, "one token: all of its times are vLLM's"


def test_beside_a_parser_tokens_without_text_are_told_only_where_they_tell_something_else() -> None:
    """As a vLLM with a parser streams a chat: its parsers make no delta of an empty text."""
    half = byte_tokenizer().encode("é", add_special_tokens=False).ids[:1]
    told = Script((*IDS[:1], *half, END))
    for fields, deltas in (({}, ["content", "none"]), ({"return_token_ids": True}, ["content", "none", "none"])):
        lane = lane_of(Endpoint.CHAT, fields_of(told, **fields), told)
        plan = replace(lane.plan, form=replace(lane.plan.form, terse=True))
        writer = stream_writer(plan, lane.prefill, lane.state)
        written = [writer.write(batch) for batch in one_by_one(whole_batch(told, plan))]
        read = [json.loads(chunk.removeprefix(b"data: "))["choices"][0]["delta"] for chunk in written if chunk]
        assert ["content" if "content" in delta else "none" for delta in read] == deltas
        assert all(delta.get("content") != "" for delta in read)
