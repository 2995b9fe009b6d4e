"""A daemon that fails: vLLM goes on where it can do so exactly, and serves the whole request where nothing was sent."""

import asyncio
import json
from typing import Any

import pytest

from gateway.endpoints import Endpoint
from gateway.errors import UpstreamFailed
from handoff import decode_pb2 as pb
from tests.kit.gateway import PROMPT, bpe_tokenizer
from tests.kit.legs import (
    ScriptedVllm,
    Step,
    answers,
    breaks,
    completion,
    failed,
    hangs,
    landed,
    reserved,
    streams,
    tokens,
)
from tests.kit.relay import (
    CHAT,
    COMPLETIONS,
    END,
    FIRST,
    MID_STREAM,
    REST,
    SO_FAR,
    TEXT,
    TOKENIZE,
    answer_of_vllm,
    body_of,
    events,
    freed,
    relayed,
    said,
)

BOTH = pytest.mark.parametrize("stream", [True, False])


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
        assert served.value("anchorleg_resumed_total", reason=reason, way="vllm") == 1
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


@BOTH
async def test_a_completion_goes_on_as_one(vllm: ScriptedVllm, stream: bool) -> None:
    vllm.answers[COMPLETIONS] = streams(completion([*REST[3:], END], "stop"))
    async with relayed([*MID_STREAM, "die"], vllm, endpoint=Endpoint.COMPLETIONS, stream=stream, max_tokens=50) as served:
        assert said(await body_of(served, answer_of_vllm(endpoint=Endpoint.COMPLETIONS))) == (TEXT, "stop")
    assert vllm.asked[0].json()["prompt"] == [*PROMPT, *SO_FAR]


async def test_the_prompt_of_a_completion_that_brings_its_ids_needs_nobody_to_count_it(vllm: ScriptedVllm) -> None:
    vllm.answers[COMPLETIONS] = streams(completion([*REST, END], "stop"))
    async with relayed(["die"], vllm, endpoint=Endpoint.COMPLETIONS, prompt=list(PROMPT), max_tokens=50) as served:
        assert said(await body_of(served, answer_of_vllm(endpoint=Endpoint.COMPLETIONS))) == (TEXT, "stop")
    assert vllm.paths() == [COMPLETIONS]


async def test_logprobs_go_on_too(vllm: ScriptedVllm) -> None:
    columns = {"tokens": [f"token_id:{END}"], "token_logprobs": [-3.0], "top_logprobs": [{f"token_id:{END}": -3.0}]}
    vllm.answers[COMPLETIONS] = streams(completion([END], "stop", logprobs=columns | {"text_offset": [0]}))
    first = answer_of_vllm(endpoint=Endpoint.COMPLETIONS)
    told = json.loads(first)
    told["choices"][0]["logprobs"] = {
        "tokens": [f"token_id:{FIRST}"],
        "token_logprobs": [-1.0],
        "top_logprobs": [{f"token_id:{FIRST}": -1.0}],
        "text_offset": [0],
    }
    script: list[Step] = [landed(FIRST), tokens(1, REST[0], logprobs=[pb.TokenLogprobs(logprob=-2.0)]), "die"]
    async with relayed(script, vllm, endpoint=Endpoint.COMPLETIONS, logprobs=0, max_tokens=9) as served:
        answer = json.loads(await body_of(served, json.dumps(told).encode()))
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-1.0, -2.0, -3.0]


async def test_logprobs_that_vllm_does_not_go_on_with_are_not_left_out(vllm: ScriptedVllm) -> None:
    vllm.answers = {COMPLETIONS: streams(completion([END], "stop")), CHAT: answers(b"vLLM's own")}
    told = json.loads(answer_of_vllm())
    entry = {"token": f"token_id:{FIRST}", "logprob": -1.0, "top_logprobs": []}
    told["choices"][0]["logprobs"] = {"content": [entry]}
    async with relayed([landed(FIRST), "die"], vllm, logprobs=True) as served:
        assert await body_of(served, json.dumps(told).encode()) == b"vLLM's own"


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
async def test_what_vllm_does_not_go_on_with_it_serves_whole_where_nothing_was_sent(vllm: ScriptedVllm, handlers: Any) -> None:
    vllm.answers = {**handlers, CHAT: answers({"own": 1})}
    async with relayed([*MID_STREAM, "die"], vllm) as served:
        assert json.loads(await body_of(served, answer_of_vllm())) == {"own": 1}
        assert served.relay.outcome == "resumed"
        assert served.value("anchorleg_resumed_total", reason="unreachable", way="vllm") == 1
        assert served.value("anchorleg_resumed_total", reason="vllm_unavailable", way="whole") == 1


async def test_what_nobody_serves_is_a_502_where_nothing_was_sent(vllm: ScriptedVllm) -> None:
    vllm.answers = {COMPLETIONS: breaks, CHAT: breaks}
    async with relayed([*MID_STREAM, "die"], vllm) as served:
        with pytest.raises(UpstreamFailed) as caught:
            await served.relay.answer(answer_of_vllm())
        assert (caught.value.status, caught.value.code) == (502, "decode_lost")
        assert served.relay.outcome == "failed"


INEXACT: dict[str, dict[str, Any]] = {
    "presence_penalty": {"presence_penalty": 0.5},
    "grammar": {"response_format": {"type": "json_object"}},
}


@pytest.mark.parametrize("fields", INEXACT.values(), ids=INEXACT.keys())
async def test_what_vllm_cannot_go_on_with_exactly_it_serves_whole_where_nothing_was_sent(
    vllm: ScriptedVllm, fields: dict[str, Any]
) -> None:
    vllm.answers[CHAT] = answers({"own": 1})
    async with relayed([*MID_STREAM, "die"], vllm, **fields) as served:
        assert json.loads(await body_of(served, answer_of_vllm())) == {"own": 1}
        assert served.value("anchorleg_resumed_total", reason="unreachable", way="whole") == 1
        assert served.value("anchorleg_resumed_total", reason="unreachable", way="vllm") == 0
    assert vllm.paths() == [CHAT]
    assert vllm.asked[0].body == served.prefill.original.raw


OTHER_PROMPTS = [
    answers({}, 400),
    answers({}, 503),
    answers({"tokens": [1, 2]}),
    answers({"tokens": [*PROMPT[:-1], PROMPT[-1] + 1]}),
    answers({"tokens": [PROMPT[0] + 1, *PROMPT[1:]]}),
]


@pytest.mark.parametrize("tokenized", OTHER_PROMPTS)
async def test_a_prompt_that_cannot_be_had_again_as_it_was_is_not_gone_on_with(vllm: ScriptedVllm, tokenized: Any) -> None:
    vllm.answers = {TOKENIZE: tokenized, CHAT: answers({"own": 1})}
    async with relayed(["die"], vllm) as served:
        assert json.loads(await body_of(served, answer_of_vllm())) == {"own": 1}
    assert COMPLETIONS not in vllm.paths()


@pytest.mark.parametrize("tokenized", OTHER_PROMPTS)
async def test_a_stream_whose_prompt_cannot_be_had_again_ends_with_an_error(vllm: ScriptedVllm, tokenized: Any) -> None:
    vllm.answers[TOKENIZE] = tokenized
    async with relayed(["die"], vllm, stream=True) as served:
        assert events(await body_of(served, answer_of_vllm()))[-1]["error"]["code"] == "decode_lost"
    assert vllm.paths() == [TOKENIZE]


async def test_a_resumed_answer_that_nobody_reads_any_more_stops_at_vllm(vllm: ScriptedVllm) -> None:
    vllm.answers[COMPLETIONS] = streams(completion(REST[3:4]), then="hang")
    async with relayed([*MID_STREAM, "die"], vllm, stream=True) as served:
        got = await served.relay.answer(answer_of_vllm())
        while COMPLETIONS not in vllm.paths():
            await anext(got.chunks)
        await got.chunks.aclose()
        await asyncio.wait_for(vllm.left.wait(), 1)
