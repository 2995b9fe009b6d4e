"""The answer phase: every token exactly once, whoever decodes it, and nothing held afterwards."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from gateway.errors import UpstreamFailed
from gateway.sse import EventReader
from gateway.upstream import UpstreamUnavailable
from handoff import decode_pb2 as pb
from tests.kit.gateway import (
    PROMPT,
    Relayed,
    ScriptedVllm,
    Step,
    answers,
    bpe_tokenizer,
    chat,
    completion,
    end_id,
    failed,
    hangs,
    ids_of,
    landed,
    prefill_answer,
    relayed,
    reserved,
    streams,
    tokens,
)
from tests.kit.valkey import eventually

CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
TEXT = " Paris. The river is the Seine."
FIRST, *REST = ids_of(TEXT)
END = end_id()


def answer_of_vllm(first: int = FIRST, finish: str = "length", **over: Any) -> bytes:
    answer = prefill_answer(first, **over)
    answer["choices"][0]["finish_reason"] = finish
    return json.dumps(answer).encode()


def decoded(ids: Sequence[int], start: int = 1, finish: Any = pb.Tokens.STOP) -> list[Step]:
    """One message for each id; the last one says how the answer ends."""
    return [tokens(start + n, token, finish=finish if n == len(ids) - 1 else pb.Tokens.NONE) for n, token in enumerate(ids)]


async def body_of(served: Relayed, answer: bytes) -> bytes:
    got = await served.relay.answer(answer)
    return b"".join([chunk async for chunk in got.chunks])


def events(body: bytes) -> list[Any]:
    return [event if event == b"[DONE]" else json.loads(event) for event in EventReader().feed(body)]


def said(body: bytes) -> tuple[str, str | None]:
    """Text and finish reason, of a stream or of one object."""
    if body.startswith(b"data:"):
        choices = [event["choices"][0] for event in events(body) if event != b"[DONE]" and event.get("choices")]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        return text, choices[-1]["finish_reason"]
    choice = json.loads(body)["choices"][0]
    return choice["message"]["content"], choice["finish_reason"]


async def freed(served: Relayed) -> None:
    await asyncio.wait_for(served.daemon.cancelled.wait(), 1)


BOTH = pytest.mark.parametrize("stream", [True, False])


@BOTH
async def test_token_one_comes_from_vllm_and_the_rest_from_the_daemon(vllm: ScriptedVllm, stream: bool) -> None:
    async with relayed([landed(FIRST), *decoded([*REST, END])], vllm, stream=stream, max_tokens=99) as served:
        got = await served.relay.answer(answer_of_vllm())
        assert got.status == 200
        assert got.headers["content-type"].startswith("text/event-stream" if stream else "application/json")
        assert "prefill;dur=" in got.headers["server-timing"]
        body = b"".join([chunk async for chunk in got.chunks])
        assert got.headers.get("content-length") == (None if stream else str(len(body)))
        assert said(body) == (TEXT, "stop")
        assert served.relay.outcome == "completed"
        assert served.value("anchorleg_tokens_total") == len(REST) + 2
        assert served.value("anchorleg_stage_seconds_count", stage="handoff") == 1
        assert served.value("anchorleg_stage_seconds_count", stage="gap") == 1
    assert vllm.asked == []


async def test_token_one_does_not_wait_for_the_daemon(vllm: ScriptedVllm) -> None:
    async with relayed(["hang"], vllm, stream=True) as served:
        got = await served.relay.answer(answer_of_vllm())
        head = await anext(got.chunks)
        assert said(head)[0] == bpe_tokenizer().decode([FIRST])
        await got.chunks.aclose()
        await freed(served)
        assert served.relay.outcome == "cancelled"


@BOTH
async def test_a_first_token_that_ends_the_answer_needs_no_decode(vllm: ScriptedVllm, stream: bool) -> None:
    async with relayed(["hang"], vllm, stream=stream) as served:
        body = await body_of(served, answer_of_vllm(END, "stop"))
        assert said(body) == ("", "stop")
        await freed(served)
        assert served.relay.outcome == "completed"


@BOTH
async def test_one_token_is_one_token(vllm: ScriptedVllm, stream: bool) -> None:
    async with relayed(["hang"], vllm, stream=stream, max_tokens=1) as served:
        body = await body_of(served, answer_of_vllm())
        assert said(body) == (bpe_tokenizer().decode([FIRST]), "length")
        await freed(served)


async def test_a_prompt_that_fills_the_context_leaves_room_for_one_token(vllm: ScriptedVllm) -> None:
    async with relayed(["hang"], vllm, context_tokens=len(PROMPT)) as served:
        assert said(await body_of(served, answer_of_vllm()))[1] == "length"


@BOTH
async def test_a_stop_string_over_the_handoff_ends_answer_and_decode(vllm: ScriptedVllm, stream: bool) -> None:
    script = [landed(FIRST), *decoded(REST, finish=pb.Tokens.NONE), "hang"]
    async with relayed(script, vllm, stream=stream, stop=["Paris. The"]) as served:
        body = await body_of(served, answer_of_vllm())
        assert said(body) == (" ", "stop")
        await freed(served)
        assert served.relay.outcome == "completed"


SO_FAR = [FIRST, *REST[:3]]
"""Tokens sent before a daemon fails in mid-stream."""

MID_STREAM = [landed(FIRST), *decoded(REST[:3], finish=pb.Tokens.NONE)]
FAILURES: dict[str, tuple[list[Step], list[int], str]] = {
    "refuses_before_landing": ([failed("handoff_failed")], [FIRST], "handoff_failed"),
    "dies_before_landing": (["die"], [FIRST], "unreachable"),
    "ends_before_landing": ([], [FIRST], "ended"),
    "never_lands": (["hang"], [FIRST], "stalled"),
    "lands_another_token": ([landed(FIRST + 1), "hang"], [FIRST], "protocol"),
    "lands_another_prompt": ([landed(FIRST, PROMPT[1:]), "hang"], [FIRST], "protocol"),
    "skips_landing": ([tokens(1, REST[0]), "hang"], [FIRST], "protocol"),
    "says_reserved_twice": ([reserved(), "hang"], [FIRST], "protocol"),
    "dies_before_token_two": ([landed(FIRST), "die"], [FIRST], "unreachable"),
    "stalls_before_token_two": ([landed(FIRST), "hang"], [FIRST], "stalled"),
    "dies_in_mid_stream": ([*MID_STREAM, "die"], SO_FAR, "unreachable"),
    "ends_in_mid_stream": (MID_STREAM, SO_FAR, "ended"),
    "fails_in_mid_stream": ([*MID_STREAM, failed("engine_failed")], SO_FAR, "engine_failed"),
    "stalls_in_mid_stream": ([*MID_STREAM, "hang"], SO_FAR, "stalled"),
    "repeats_a_position": ([*MID_STREAM, tokens(3, REST[2]), "hang"], SO_FAR, "protocol"),
    "skips_a_position": ([*MID_STREAM, tokens(5, REST[4]), "hang"], SO_FAR, "protocol"),
    "lands_again": ([*MID_STREAM, landed(FIRST), "hang"], SO_FAR, "protocol"),
    "says_nothing_known": ([*MID_STREAM, pb.DecodeEvent(), "hang"], SO_FAR, "protocol"),
    "finishes_in_an_unknown_way": ([*MID_STREAM, tokens(4, REST[3], finish=7), "hang"], SO_FAR, "protocol"),
    "sends_no_tokens": ([*MID_STREAM, tokens(4), "hang"], SO_FAR, "protocol"),
}


@BOTH
@pytest.mark.parametrize(("script", "so_far", "reason"), FAILURES.values(), ids=FAILURES.keys())
async def test_vllm_goes_on_where_the_daemon_stopped(
    vllm: ScriptedVllm, stream: bool, script: list[Step], so_far: list[int], reason: str
) -> None:
    left = [FIRST, *REST][len(so_far) :]
    vllm.answers[TOKENIZE] = answers({"tokens": list(PROMPT)})
    vllm.answers[COMPLETIONS] = streams(completion(left[:1]), completion([*left[1:], END], "stop"))
    async with relayed(script, vllm, stream=stream, max_tokens=50, seed=7, stream_options=None) as served:
        body = await body_of(served, answer_of_vllm())
        assert said(body) == (TEXT, "stop")
        resume = vllm.asked[-1]
        assert resume.path == COMPLETIONS
        assert resume.headers["authorization"] == "Bearer client"
        assert resume.json()["prompt"] == [*PROMPT, *so_far]
        assert resume.json()["max_tokens"] == 50 - len(so_far)
        assert resume.json()["seed"] == 7 + len(so_far)
        assert served.relay.outcome == "resumed"
        assert served.value("anchorleg_resumed_total", reason=reason) == 1
        assert served.value("anchorleg_tokens_total") == len(REST) + 2
        if "hang" in script:
            await freed(served)
    landed_well = script[:1] == [landed(FIRST)]
    assert vllm.paths() == ([] if landed_well else [TOKENIZE]) + [COMPLETIONS]


async def test_usage_of_a_resumed_answer_adds_up(vllm: ScriptedVllm) -> None:
    vllm.answers[COMPLETIONS] = streams(completion([*REST[3:]], "length"))
    async with relayed([*MID_STREAM, "die"], vllm, max_tokens=len(REST) + 1) as served:
        usage = json.loads(await body_of(served, answer_of_vllm()))["usage"]
        assert usage["prompt_tokens"] == len(PROMPT)
        assert usage["completion_tokens"] == len(REST) + 1
        assert usage["total_tokens"] == len(PROMPT) + len(REST) + 1


async def test_a_daemon_that_dies_after_its_last_token_needs_nobody_to_go_on(vllm: ScriptedVllm) -> None:
    async with relayed([*MID_STREAM, "die"], vllm, max_tokens=4) as served:
        assert said(await body_of(served, answer_of_vllm()))[1] == "length"
        assert vllm.asked == []


async def test_a_stop_string_may_begin_at_the_daemon_and_end_at_vllm(vllm: ScriptedVllm) -> None:
    vllm.answers[COMPLETIONS] = streams(completion(REST[3:]), then="hang")
    text_so_far = bpe_tokenizer().decode(SO_FAR)
    stop = text_so_far[-2:] + TEXT[len(text_so_far) :][:2]
    async with relayed([*MID_STREAM, "die"], vllm, stream=True, stop=[stop]) as served:
        assert said(await body_of(served, answer_of_vllm())) == (text_so_far[:-2], "stop")
    await asyncio.wait_for(vllm.left.wait(), 1)


LOST = {
    "refused": {COMPLETIONS: answers({}, 500)},
    "breaks_off": {COMPLETIONS: streams(completion(REST[3:4]), then="die")},
    "stalls": {COMPLETIONS: hangs},
    "aborted": {COMPLETIONS: streams(completion([], "abort"))},
}


@pytest.mark.parametrize("handlers", LOST.values(), ids=LOST.keys())
async def test_what_nobody_goes_on_with_ends_a_stream_with_an_error_and_no_done(vllm: ScriptedVllm, handlers: Any) -> None:
    vllm.answers = handlers
    async with relayed([*MID_STREAM, "die"], vllm, stream=True) as served:
        *shown, last = events(await body_of(served, answer_of_vllm()))
        assert last["error"]["code"] == "decode_lost"
        assert b"[DONE]" not in shown
        assert all(event["choices"][0]["finish_reason"] is None for event in shown)
        assert served.relay.outcome == "failed"


@pytest.mark.parametrize("handlers", LOST.values(), ids=LOST.keys())
async def test_what_nobody_goes_on_with_is_a_502_where_nothing_was_sent(vllm: ScriptedVllm, handlers: Any) -> None:
    vllm.answers = handlers
    async with relayed([*MID_STREAM, "die"], vllm) as served:
        with pytest.raises(UpstreamFailed) as caught:
            await served.relay.answer(answer_of_vllm())
        assert (caught.value.status, caught.value.code) == (502, "decode_lost")
        assert served.relay.outcome == "failed"


@pytest.mark.parametrize("tokenized", [answers({}, 400), answers({"tokens": [1, 2]}), answers({}, 503)])
async def test_a_prompt_that_cannot_be_had_again_as_it_was_is_not_gone_on_with(vllm: ScriptedVllm, tokenized: Any) -> None:
    vllm.answers[TOKENIZE] = tokenized
    async with relayed(["die"], vllm) as served:
        with pytest.raises(UpstreamFailed):
            await served.relay.answer(answer_of_vllm())
    assert COMPLETIONS not in vllm.paths()


async def test_a_prompt_that_reads_otherwise_the_second_time_is_not_gone_on_with(vllm: ScriptedVllm) -> None:
    vllm.answers[TOKENIZE] = answers({"tokens": [*PROMPT[:-1], PROMPT[-1] + 1]})
    async with relayed(["die"], vllm) as served:
        with pytest.raises(UpstreamFailed):
            await served.relay.answer(answer_of_vllm())
    assert COMPLETIONS not in vllm.paths()


UNUSABLE = {
    "no_params": answer_of_vllm(kv_transfer_params=None),
    "other_params": answer_of_vllm(kv_transfer_params={"remote": 1}),
    "no_token": answer_of_vllm(kv_transfer_params={"anchorleg": {"prompt_tail": []}}),
    "negative_token": answer_of_vllm(kv_transfer_params={"anchorleg": {"first_token": -1, "prompt_tail": []}}),
    "endless_token": answer_of_vllm(kv_transfer_params={"anchorleg": {"first_token": float("inf"), "prompt_tail": []}}),
    "text_token": answer_of_vllm(kv_transfer_params={"anchorleg": {"first_token": "5", "prompt_tail": []}}),
    "odd_tail": answer_of_vllm(kv_transfer_params={"anchorleg": {"first_token": 5, "prompt_tail": None}}),
    "aborted": answer_of_vllm(finish="abort"),
    "empty": b"",
    "no_json": b"<html>",
    "no_object": b"[]",
    "cut": answer_of_vllm()[:-1],
    "nested": b"[" * 100_000,
}


@BOTH
@pytest.mark.parametrize("unusable", UNUSABLE.values(), ids=UNUSABLE.keys())
async def test_without_a_handoff_the_original_request_is_replayed_byte_for_byte(
    vllm: ScriptedVllm, stream: bool, unusable: bytes
) -> None:
    raw = f' {{"temperature" : 0.10, {json.dumps(chat(max_tokens=5, stream=stream))[1:]}\n'.encode()
    vllm.answers[CHAT] = answers(b"vLLM's own answer", 200, "text/plain")
    async with relayed(["hang"], vllm, raw=raw) as served:
        got = await served.relay.answer(unusable)
        assert b"".join([chunk async for chunk in got.chunks]) == b"vLLM's own answer"
        assert (got.status, got.headers["content-type"]) == (200, "text/plain")
        (asked,) = vllm.asked
        assert asked.body == raw
        assert asked.headers["authorization"] == "Bearer client"
        assert served.relay.outcome == "resumed"
        assert served.value("anchorleg_resumed_total", reason="no_handoff") == 1
        await freed(served)


async def test_a_replay_that_vllm_refuses_is_vllms_error(vllm: ScriptedVllm) -> None:
    vllm.answers[CHAT] = answers({"error": {"message": "no"}}, 429)
    async with relayed(["hang"], vllm) as served:
        got = await served.relay.answer(b"")
        assert got.status == 429
        assert json.loads(b"".join([chunk async for chunk in got.chunks])) == {"error": {"message": "no"}}
        assert served.relay.outcome == "vllm_error"


async def test_a_replay_that_nobody_answers_is_a_502() -> None:
    async with ScriptedVllm({}).serving() as vllm:
        pass
    async with relayed(["hang"], vllm) as served:
        with pytest.raises(UpstreamFailed):
            await served.relay.answer(b"")
        assert served.relay.outcome == "failed"
        await freed(served)


async def test_a_replay_that_breaks_off_is_never_a_clean_end(vllm: ScriptedVllm) -> None:
    vllm.answers[CHAT] = streams(b"data: 1\n\n", then="die")
    async with relayed(["hang"], vllm, stream=True) as served:
        with pytest.raises(UpstreamUnavailable):
            await body_of(served, b"")
        assert served.relay.outcome == "failed"


@pytest.mark.parametrize("read", [0, 1])
async def test_a_replay_that_nobody_reads_any_more_stops_at_vllm(vllm: ScriptedVllm, read: int) -> None:
    vllm.answers[CHAT] = streams(b"data: 1\n\n", then="hang")
    async with relayed(["hang"], vllm, stream=True) as served:
        got = await served.relay.answer(b"")
        for _ in range(read):
            await anext(got.chunks)
        await got.chunks.aclose()
    await asyncio.wait_for(vllm.left.wait(), 1)


@pytest.mark.parametrize("read", [1, 2, 3])
async def test_an_answer_that_nobody_reads_any_more_frees_the_slot(vllm: ScriptedVllm, read: int) -> None:
    async with relayed([*MID_STREAM, "hang"], vllm, stream=True) as served:
        got = await served.relay.answer(answer_of_vllm())
        for _ in range(read):
            await anext(got.chunks)
        await got.chunks.aclose()
        await freed(served)


async def test_a_relay_that_never_began_frees_the_slot(vllm: ScriptedVllm) -> None:
    async with relayed([*MID_STREAM, "hang"], vllm, stream=True) as served:
        await served.relay.answer(answer_of_vllm())
        await served.relay.aclose()
        await served.relay.aclose()
        await freed(served)


async def test_a_resumed_answer_that_nobody_reads_any_more_stops_at_vllm(vllm: ScriptedVllm) -> None:
    vllm.answers[COMPLETIONS] = streams(completion(REST[3:4]), then="hang")
    async with relayed([*MID_STREAM, "die"], vllm, stream=True) as served:
        got = await served.relay.answer(answer_of_vllm())
        while COMPLETIONS not in vllm.paths():
            await anext(got.chunks)
        await got.chunks.aclose()
        await asyncio.wait_for(vllm.left.wait(), 1)


async def test_another_status_is_not_taken_and_frees_the_slot(vllm: ScriptedVllm) -> None:
    async with relayed(["hang"], vllm) as served:
        assert served.relay.accepts("200")
        assert not served.relay.accepts("404")
        assert served.relay.outcome == "vllm_error"
        await freed(served)


async def test_an_answer_that_is_cancelled_while_it_is_collected_frees_the_slot(vllm: ScriptedVllm) -> None:
    async with relayed([*MID_STREAM, "hang"], vllm) as served:
        answering = asyncio.create_task(served.relay.answer(answer_of_vllm()))

        async def decoding() -> bool:
            return served.value("anchorleg_tokens_total") == len(SO_FAR)

        await eventually(decoding)
        answering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answering
        await freed(served)
