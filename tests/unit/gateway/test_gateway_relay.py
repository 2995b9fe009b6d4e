"""The answer phase: every token exactly once, whoever decodes it, and nothing held afterwards."""

import asyncio
import json
from typing import Any

import pytest

from gateway.endpoints import Endpoint
from gateway.errors import UpstreamFailed
from gateway.upstream import UpstreamUnavailable
from handoff import decode_pb2 as pb
from tests.kit.gateway import PROMPT, bpe_tokenizer, chat, handed_over
from tests.kit.legs import ScriptedVllm, answers, landed, streams, tokens
from tests.kit.relay import (
    CHAT,
    END,
    FIRST,
    MID_STREAM,
    REST,
    SO_FAR,
    TEXT,
    answer_of_vllm,
    body_of,
    decoded,
    events,
    freed,
    relayed,
    said,
)
from tests.kit.valkey import eventually

BOTH = pytest.mark.parametrize("stream", [True, False])


@BOTH
@pytest.mark.parametrize("endpoint", Endpoint)
async def test_token_one_comes_from_vllm_and_the_rest_from_the_daemon(
    vllm: ScriptedVllm, endpoint: Endpoint, stream: bool
) -> None:
    script = [landed(FIRST), *decoded([*REST, END])]
    async with relayed(script, vllm, endpoint=endpoint, stream=stream, max_tokens=99) as served:
        got = await served.relay.answer(answer_of_vllm(endpoint=endpoint))
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
async def test_logprobs_of_the_first_token_are_vllms_and_the_others_the_daemons(vllm: ScriptedVllm, stream: bool) -> None:
    script = [landed(FIRST), tokens(1, REST[0], END, finish=pb.Tokens.STOP, logprobs=[logprob(-0.25), logprob(-2.0)])]
    async with relayed(script, vllm, stream=stream, logprobs=True, top_logprobs=1) as served:
        body = await body_of(served, told_with_logprobs(-0.5))
    assert [entry["logprob"] for entry in content_logprobs(body)] == [-0.5, -0.25, -2.0]
    assert [len(entry["top_logprobs"]) for entry in content_logprobs(body)] == [1, 1, 1]


def logprob(value: float) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(logprob=value, top_ids=[7], top_logprobs=[-0.125])


def told_with_logprobs(value: float) -> bytes:
    answer = json.loads(answer_of_vllm())
    entry = {"token": f"token_id:{FIRST}", "logprob": value, "bytes": None}
    answer["choices"][0]["logprobs"] = {"content": [{**entry, "top_logprobs": [entry]}]}
    return json.dumps(answer).encode()


def content_logprobs(body: bytes) -> list[Any]:
    parts = [json.loads(body)] if body.startswith(b"{") else [event for event in events(body) if event != b"[DONE]"]
    return [entry for part in parts for entry in ((part["choices"] or [{}])[0].get("logprobs") or {}).get("content", ())]


async def test_a_first_token_without_the_logprobs_that_were_asked_for_is_not_gone_on_from(vllm: ScriptedVllm) -> None:
    vllm.answers[CHAT] = answers(b"vLLM's own")
    async with relayed(["hang"], vllm, logprobs=True) as served:
        assert await body_of(served, answer_of_vllm()) == b"vLLM's own"
        assert served.value("anchorleg_resumed_total", reason="no_handoff", way="whole") == 1


@BOTH
async def test_where_vllm_is_configured_otherwise_it_answers_itself_and_the_next_requests_know(
    vllm: ScriptedVllm, stream: bool
) -> None:
    vllm.answers[CHAT] = answers(b"vLLM's own")
    async with relayed(["hang"], vllm, stream=stream) as served:
        otherwise = answer_of_vllm(kv_transfer_params=handed_over(FIRST, defaults={"temperature": 0.6}))
        assert await body_of(served, otherwise) == b"vLLM's own"
        assert served.relay.outcome == "resumed"
        assert served.value("anchorleg_resumed_total", reason="vllm_configured_otherwise", way="whole") == 1
        await freed(served)
        prefill = served.prefill
        assert "temperature" in str(served.parts.servings.why_not(prefill.plan, prefill.original, prefill.card))


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


@pytest.mark.parametrize("ending", [{"stop": [" "]}, {"max_tokens": 1}])
async def test_an_answer_that_the_first_token_ends_holds_no_slot_while_its_client_reads(
    vllm: ScriptedVllm, ending: dict[str, Any]
) -> None:
    async with relayed(["hang"], vllm, stream=True, **ending) as served:
        got = await served.relay.answer(answer_of_vllm())
        await anext(got.chunks)
        await freed(served)
        await got.chunks.aclose()


@BOTH
async def test_a_stop_string_over_the_handoff_ends_answer_and_decode(vllm: ScriptedVllm, stream: bool) -> None:
    script = [landed(FIRST), *decoded(REST, finish=pb.Tokens.NONE), "hang"]
    async with relayed(script, vllm, stream=stream, stop=["Paris. The"]) as served:
        body = await body_of(served, answer_of_vllm())
        assert said(body) == (" ", "stop")
        await freed(served)
        assert served.relay.outcome == "completed"


def told(**over: Any) -> bytes:
    """vLLM's answer with something else in what its connector tells; None leaves a member out."""
    params = handed_over(FIRST)
    params["anchorleg"] = {key: value for key, value in (params["anchorleg"] | over).items() if value is not None}
    return answer_of_vllm(kv_transfer_params=params)


UNUSABLE = {
    "no_params": answer_of_vllm(kv_transfer_params=None),
    "other_params": answer_of_vllm(kv_transfer_params={"remote": 1}),
    "odd_params": answer_of_vllm(kv_transfer_params={"anchorleg": "yes"}),
    "no_token": told(first_token=None),
    "negative_token": told(first_token=-1),
    "endless_token": told(first_token=float("inf")),
    "text_token": told(first_token="5"),
    "no_tail": told(prompt_tail=None),
    "odd_tail": told(prompt_tail=[None]),
    "no_digest": told(prompt_digest=None),
    "no_serving": told(serving=None),
    "empty_serving": told(serving={}),
    "odd_serving": told(serving={"defaults": 1}),
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
        assert served.value("anchorleg_resumed_total", reason="no_handoff", way="whole") == 1
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
