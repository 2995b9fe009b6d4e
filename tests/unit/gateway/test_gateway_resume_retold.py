"""A greedy stream that nobody can go on with: vLLM answers it again, and what the client has is left out."""

import asyncio
import json
from typing import Any

import pytest

from gateway.endpoints import Endpoint
from handoff import decode_pb2 as pb
from tests.kit.gateway import bpe_tokenizer, chat, prompt_request
from tests.kit.legs import ScriptedVllm, answers, chat_chunk, completion, hangs, landed, streams, tokens
from tests.kit.relay import (
    CHAT,
    COMPLETIONS,
    END,
    FIRST,
    MID_STREAM,
    REST,
    SO_FAR,
    TEXT,
    answer_of_vllm,
    body_of,
    lost,
    relayed,
    said,
)

GREEDY: dict[str, Any] = {"stream": True, "temperature": 0, "frequency_penalty": 0.5, "max_tokens": 50}
DIES = [*MID_STREAM, "die"]
ANSWER = [FIRST, *REST, END]


CUTS = [
    [1] * len(ANSWER),
    [len(SO_FAR), len(ANSWER) - len(SO_FAR)],
    [len(SO_FAR) + 1, len(ANSWER) - len(SO_FAR) - 1],
    [2, len(ANSWER) - 2],
    [len(ANSWER)],
]


@pytest.mark.parametrize("sizes", CUTS, ids=str)
@pytest.mark.parametrize("endpoint", Endpoint)
async def test_what_the_client_has_is_left_out_however_vllm_cuts_its_answer(
    vllm: ScriptedVllm, endpoint: Endpoint, sizes: list[int]
) -> None:
    make = chat_chunk if endpoint is Endpoint.CHAT else completion
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    parts = [ANSWER[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    chunks = [make(part, "stop" if part is parts[-1] else None) for part in parts]
    vllm.answers[endpoint] = streams(*([chat_chunk(None)] if endpoint is Endpoint.CHAT else []), *chunks)
    async with relayed(DIES, vllm, endpoint=endpoint, **GREEDY) as served:
        assert said(await body_of(served, answer_of_vllm(endpoint=endpoint))) == (TEXT, "stop")
        assert served.relay.outcome == "resumed"
        assert served.value("anchorleg_resumed_total", reason="leases_unavailable", way="retold") == 1
        assert served.value("anchorleg_tokens_total") == len(ANSWER)


@pytest.mark.parametrize("endpoint", Endpoint)
async def test_vllm_is_asked_what_the_client_asked_but_for_the_form(
    vllm: ScriptedVllm, oracle: Any, endpoint: Endpoint
) -> None:
    asked_for = chat if endpoint is Endpoint.CHAT else prompt_request
    form: dict[str, Any] = {"stop": ["zzz"], "stream_options": {"include_usage": True}, "return_token_ids": False}
    logprobs: dict[str, Any] = {"logprobs": True} if endpoint is Endpoint.CHAT else {"logprobs": 1}
    for extra in ({}, logprobs):
        vllm.asked.clear()
        lands, *steps = MID_STREAM
        spoken = [tokens(1 + n, token, logprobs=[pb.TokenLogprobs(logprob=-1.0)]) for n, token in enumerate(SO_FAR[1:])]
        script = [lands, *(spoken if extra else steps), "die"]
        async with relayed(script, vllm, endpoint=endpoint, **GREEDY, **form, **extra, user="me") as served:
            first = json.loads(answer_of_vllm(endpoint=endpoint))
            first["choices"][0]["logprobs"] = told(endpoint) if extra else None
            await body_of(served, json.dumps(first).encode())
        (asked,) = vllm.asked
        expected = {**asked_for(**GREEDY, **extra, user="me"), "stream": True, "return_token_ids": True}
        assert asked.json() == (expected | {"return_tokens_as_token_ids": True} if extra else expected)
        kind = oracle.chat.ChatCompletionRequest if endpoint is Endpoint.CHAT else oracle.CompletionRequest
        assert kind.model_validate(asked.json()).return_token_ids


def told(endpoint: Endpoint) -> dict[str, Any]:
    name = f"token_id:{FIRST}"
    if endpoint is Endpoint.CHAT:
        return {"content": [{"token": name, "logprob": -1.0, "top_logprobs": []}]}
    return {"tokens": [name], "token_logprobs": [-1.0], "top_logprobs": [{name: -1.0}], "text_offset": [0]}


OTHERS = {
    "another token": streams(chat_chunk([FIRST, REST[0], REST[1] + 1]), then="hang"),
    "another token later": streams(chat_chunk([FIRST]), chat_chunk([*REST[:2], REST[2] + 1, END], "stop")),
    "an end too early": streams(chat_chunk([FIRST, REST[0]], "stop")),
    "an end where it goes on": streams(chat_chunk(SO_FAR, "stop")),
    "an end by length": streams(chat_chunk(SO_FAR), chat_chunk([], "length")),
    "no ids": streams(chat_chunk(None), chat_chunk(None, text=" Paris")),
    "nothing": streams(),
    "an abort": streams(chat_chunk([*SO_FAR, REST[3]]), chat_chunk([], "abort")),
    "a refusal": answers({"error": {}}, 400),
    "a break": streams(chat_chunk(SO_FAR), then="die"),
    "a stall": hangs,
}


@pytest.mark.parametrize("handler", OTHERS.values(), ids=OTHERS.keys())
async def test_another_answer_than_the_one_that_has_begun_is_an_error(vllm: ScriptedVllm, handler: Any) -> None:
    vllm.answers[CHAT] = handler
    async with relayed(DIES, vllm, **GREEDY) as served:
        assert lost(await body_of(served, answer_of_vllm()))
        assert served.relay.outcome == "failed"


async def test_a_sampled_answer_is_not_told_again(vllm: ScriptedVllm) -> None:
    async with relayed(DIES, vllm, **GREEDY | {"temperature": 0.5}) as served:
        assert lost(await body_of(served, answer_of_vllm()))
    assert vllm.asked == []


async def test_a_greedy_stream_whose_prompt_cannot_be_had_again_is_told_again(vllm: ScriptedVllm) -> None:
    vllm.answers = {"/tokenize": answers({}, 503), CHAT: streams(chat_chunk(ANSWER, "stop"))}
    fields = GREEDY | {"frequency_penalty": 0}
    async with relayed(["die"], vllm, **fields) as served:
        assert said(await body_of(served, answer_of_vllm())) == (TEXT, "stop")
    assert vllm.paths() == ["/tokenize", CHAT]


async def test_a_stop_string_may_begin_in_what_was_sent_and_end_in_what_is_told_again(vllm: ScriptedVllm) -> None:
    vllm.answers[CHAT] = streams(chat_chunk(ANSWER[:-1]), then="hang")
    text_so_far = bpe_tokenizer().decode(SO_FAR)
    stop = text_so_far[-2:] + TEXT[len(text_so_far) :][:2]
    async with relayed(DIES, vllm, stop=[stop], **GREEDY) as served:
        assert said(await body_of(served, answer_of_vllm())) == (text_so_far[:-2], "stop")
    await asyncio.wait_for(vllm.left.wait(), 1)


async def test_a_client_that_leaves_what_is_told_again_stops_vllm(vllm: ScriptedVllm) -> None:
    vllm.answers[CHAT] = streams(chat_chunk([*SO_FAR, REST[3]]), then="hang")
    async with relayed(DIES, vllm, **GREEDY) as served:
        got = await served.relay.answer(answer_of_vllm())
        for _ in range(len(SO_FAR) + 1):
            await anext(got.chunks)
        await got.chunks.aclose()
        await asyncio.wait_for(vllm.left.wait(), 1)


async def test_vllm_goes_on_rather_than_tell_again_where_it_can(vllm: ScriptedVllm) -> None:
    vllm.answers = {COMPLETIONS: answers({}, 503), CHAT: streams(chat_chunk(ANSWER, "stop"))}
    async with relayed([landed(FIRST), "die"], vllm, **GREEDY | {"frequency_penalty": 0}) as served:
        assert said(await body_of(served, answer_of_vllm())) == (TEXT, "stop")
    assert vllm.paths() == [COMPLETIONS, CHAT]
