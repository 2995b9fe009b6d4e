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
from gateway.reply import AnswerState, PrefillAnswer, json_writer, read_prefill_answer, stream_writer
from gateway.tokens import Batch, TokenLogprobs
from tests.kit.gateway import ids_of
from tests.kit.lane_replies import (
    Lane,
    cut,
    lane_of,
    lane_stream,
    lane_whole,
    one_by_one,
    plan_of,
    prefill_leg,
    whole_batch,
)
from tests.kit.scripts import Script, byte_tokenizer, card_of, id_of
from tests.kit.vllm_replies import parsed, untimed, vllm_stream, vllm_whole

TEXT = 'He said "née\n🙂", and left.\u2028\\'
IDS = tuple(ids_of(TEXT))
END, TURN = id_of(byte_tokenizer(), "<end>"), id_of(byte_tokenizer(), "<turn>")
OTHERS = tuple(zip(ids_of("@#"), (-(2.0**-15), -0.125), strict=True))
LOGPROBS = tuple(TokenLogprobs(-0.25 * index, OTHERS) for index in range(len(IDS) + 1))
USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
CONTINUOUS: dict[str, Any] = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def script(ending: int | None = END, **over: Any) -> Script:
    """The text, and how a model ends it; None: it would go on."""
    ids = IDS if ending is None else (*IDS, ending)
    return Script(**{"ids": ids, "logprobs": LOGPROBS[: len(ids)], **over})


def fields_of(told: Script, **fields: Any) -> dict[str, Any]:
    return {"max_tokens": len(told.ids), **fields}


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


def lane_from(leg: Any, **fields: Any) -> Lane:
    """The lane with an answer to the prefill leg that need not be vLLM's."""
    plan = plan_of(Endpoint.CHAT, fields)
    prefill = read_prefill_answer(Endpoint.CHAT, json.dumps(leg).encode())
    return Lane(plan, prefill, AnswerState(card_of(byte_tokenizer()), plan, script().prompt))


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


def script_for(told: Script, fields: dict[str, Any]) -> Script:
    """With as many alternatives as the fields ask for."""
    count = fields.get("top_logprobs", 0)
    logprobs = tuple(TokenLogprobs(each.logprob, each.top[:count]) for each in told.logprobs)
    return Script(told.ids, logprobs, fingerprint=told.fingerprint)


def listed(value: Any) -> str:
    """As JSON: nulls, order and all."""
    return json.dumps(untimed(value), indent=1)


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
        plan = plan_of(Endpoint.CHAT, USAGE)
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
