"""The gateway's own calls to vLLM, against a real HTTP server that misbehaves."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from gateway.body import Body
from gateway.plan import Plan, make_plan
from gateway.tokens import Batch
from gateway.upstream import Upstream, UpstreamUnavailable, credentials_in, read_token_ids
from tests.kit.gateway import (
    CREDENTIALS,
    ScriptedVllm,
    answers,
    body,
    card,
    chat,
    completion,
    hangs,
    streams,
)

CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"


@pytest.fixture
async def upstream(vllm: ScriptedVllm) -> AsyncIterator[Upstream]:
    async with Upstream(vllm.url, token_timeout_s=0.3, tokenize_timeout_s=0.3, generation_timeout_s=5) as client:
        yield client


def plan(**fields: Any) -> Plan:
    made = make_plan(body(**fields), card())
    assert isinstance(made, Plan)
    return made


async def resumed(upstream: Upstream, plan_: Plan | None = None) -> list[Batch]:
    async with aclosing(upstream.resume(plan_ or plan(), [1, 2], [3], 7, CREDENTIALS)) as batches:
        return [batch async for batch in batches]


async def test_a_prompt_is_counted_with_the_clients_credentials_and_the_prompts_own_bytes(
    vllm: ScriptedVllm, upstream: Upstream
) -> None:
    vllm.answers[TOKENIZE] = answers({"count": 2, "tokens": [5, 6]})
    raw = b'{"max_tokens":5, "model":"tiny","messages": [{"role":"user","content":"\\u00e9"}],"cache_salt":"s"}'
    assert await upstream.prompt_ids(Body(raw), CREDENTIALS) == [5, 6]
    (asked,) = vllm.asked
    assert asked.headers["authorization"] == "Bearer client"
    assert asked.headers["x-request-id"] == "r1"
    assert b'"messages": [{"role":"user","content":"\\u00e9"}]' in asked.body
    assert set(asked.json()) == {"messages", "model"}


@pytest.mark.parametrize("status", [400, 401, 404, 422])
async def test_a_prompt_that_vllm_refuses_has_no_ids(vllm: ScriptedVllm, upstream: Upstream, status: int) -> None:
    vllm.answers[TOKENIZE] = answers({"error": {}}, status)
    assert await upstream.prompt_ids(body(), CREDENTIALS) is None


RUBBISH = [
    *(b"", b"x", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"tokens":null}', b'{"tokens":5}', b'{"tokens":["a"]}'),
    *(b'{"tokens":[-1]}', b'{"tokens":[1e999]}', b'{"tokens":[4294967296]}', b'{"tokens":{"1":2}}', b'{"tokens":[true]}'),
]


async def test_a_count_that_is_none_counts_as_no_answer(vllm: ScriptedVllm, upstream: Upstream) -> None:
    for raw in RUBBISH:
        vllm.answers[TOKENIZE] = answers(raw)
        with pytest.raises(UpstreamUnavailable, match="/tokenize"):
            await upstream.prompt_ids(body(), CREDENTIALS)


async def test_a_proxy_of_the_environment_does_not_hear_of_calls_inside_the_lane(
    vllm: ScriptedVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    vllm.answers[TOKENIZE] = answers({"tokens": [1]})
    async with Upstream(vllm.url, token_timeout_s=1, tokenize_timeout_s=1, generation_timeout_s=1) as upstream:
        assert await upstream.prompt_ids(body(), CREDENTIALS) == [1]


async def test_a_count_that_does_not_come_or_breaks_is_given_up_in_time(vllm: ScriptedVllm, upstream: Upstream) -> None:
    for handler in (hangs, streams(b'{"tok', then="hang"), streams(b'{"tok', then="die"), answers({}, 503)):
        vllm.answers[TOKENIZE] = handler
        async with asyncio.timeout(3):
            with pytest.raises(UpstreamUnavailable, match="/tokenize"):
                await upstream.prompt_ids(body(), CREDENTIALS)


async def test_where_nobody_listens_every_call_says_so() -> None:
    async with Upstream("http://127.0.0.1:1", token_timeout_s=1, tokenize_timeout_s=1, generation_timeout_s=1) as nobody:
        with pytest.raises(UpstreamUnavailable):
            await nobody.prompt_ids(body(), CREDENTIALS)
        with pytest.raises(UpstreamUnavailable):
            await nobody.replay(body(), CREDENTIALS)
        with pytest.raises(UpstreamUnavailable):
            await resumed(nobody)


async def test_vllm_goes_on_after_the_tokens_so_far(vllm: ScriptedVllm, upstream: Upstream) -> None:
    vllm.answers[COMPLETIONS] = streams(completion([4]), completion([5, 6], "length"), b"data: [DONE]\n\n")
    asked_for = plan(temperature=0.5, top_p=0.9, top_k=5, seed=2**63 - 1, ignore_eos=True, cache_salt="tenant")
    assert await resumed(upstream, asked_for) == [Batch((4,)), Batch((5, 6), "length")]
    (asked,) = vllm.asked
    assert asked.headers["authorization"] == "Bearer client"
    assert asked.json() == {
        "model": "tiny",
        "prompt": [1, 2, 3],
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "ignore_eos": True,
        "seed": 0,
        "cache_salt": "tenant",
        "stream": True,
        "return_token_ids": True,
    }


async def test_a_resume_is_a_request_that_vllm_accepts(vllm: ScriptedVllm, upstream: Upstream, oracle: Any) -> None:
    vllm.answers[COMPLETIONS] = streams(completion([4], "stop"))
    await resumed(upstream, plan(seed=-5, temperature=0, cache_salt="tenant"))
    asked = oracle.CompletionRequest.model_validate(vllm.asked[0].json())
    assert (asked.prompt, asked.max_tokens, asked.cache_salt) == ([1, 2, 3], 7, "tenant")


async def test_text_with_line_separators_and_cuts_inside_characters_is_read(vllm: ScriptedVllm, upstream: Upstream) -> None:
    whole = completion([4], text="a\u2028b\x85c🙂") + completion([5], "stop").replace(b"\n", b"\r\n")
    vllm.answers[COMPLETIONS] = streams(*(whole[i : i + 1] for i in range(len(whole))))
    assert await resumed(upstream) == [Batch((4,)), Batch((5,), "stop")]


@pytest.mark.parametrize(
    "chunks",
    [
        (),
        (b"data: [DONE]\n\n",),
        (completion([4]), b"data: [DONE]\n\n"),
        (completion([4]),),
        (b"data: {\n\n",),
        (b'data: {"error":{"message":"no"}}\n\n',),
        (b'data: {"choices":[]}\n\n',),
        (b'data: {"choices":[{"finish_reason":null,"text":"a"}]}\n\n',),
        (b'data: {"choices":[{"finish_reason":null,"token_ids":null}]}\n\n',),
        (b'data: {"choices":[{"finish_reason":null,"token_ids":[-1]}]}\n\n',),
        (b'data: {"choices":[{"token_ids":[1]}]}\n\n',),
        (completion([4], "abort"),),
        (completion([4], "error"),),
    ],
)
async def test_an_answer_that_vllm_does_not_finish_is_lost(
    vllm: ScriptedVllm, upstream: Upstream, chunks: tuple[bytes, ...]
) -> None:
    vllm.answers[COMPLETIONS] = streams(*chunks)
    with pytest.raises(UpstreamUnavailable, match="/v1/completions"):
        await resumed(upstream)


async def test_a_resume_that_is_refused_stalls_or_dies_is_lost_in_time(vllm: ScriptedVllm, upstream: Upstream) -> None:
    for handler in (answers({}, 400), answers({}, 503), streams(completion([4]), then="hang"), streams(then="die"), hangs):
        vllm.answers[COMPLETIONS] = handler
        async with asyncio.timeout(3):
            with pytest.raises(UpstreamUnavailable, match="/v1/completions"):
                await resumed(upstream)


async def test_a_resume_that_is_no_longer_wanted_stops_at_vllm(vllm: ScriptedVllm, upstream: Upstream) -> None:
    vllm.answers[COMPLETIONS] = streams(completion([4]), then="hang")
    async with aclosing(upstream.resume(plan(), [1], [2], 7, CREDENTIALS)) as batches:
        assert await anext(batches) == Batch((4,))
    await asyncio.wait_for(vllm.left.wait(), 1)


async def test_a_request_is_replayed_byte_for_byte_and_its_answer_too(vllm: ScriptedVllm, upstream: Upstream) -> None:
    raw = b' { "model":"tiny", "messages":[], "x": 1.0 } '
    vllm.answers[CHAT] = answers(b"\x00any bytes", 418, "text/odd")
    replayed = await upstream.replay(Body(raw), CREDENTIALS)
    assert (replayed.status, replayed.content_type) == (418, "text/odd")
    assert b"".join([chunk async for chunk in replayed.chunks()]) == b"\x00any bytes"
    (asked,) = vllm.asked
    assert asked.body == raw
    assert asked.headers["authorization"] == "Bearer client"
    assert asked.headers["content-type"] == "application/json"
    assert asked.headers["accept-encoding"] == "identity", "compressed bytes would be passed on without saying so"


async def test_an_answer_that_does_not_stream_may_take_its_whole_time(vllm: ScriptedVllm, upstream: Upstream) -> None:
    release = asyncio.Event()

    async def late(request: Any) -> Any:
        await release.wait()
        return await answers({})(request)

    vllm.answers[CHAT] = late
    replaying = asyncio.create_task(upstream.replay(Body(json.dumps(chat()).encode()), CREDENTIALS))
    with pytest.raises(UpstreamUnavailable):
        await upstream.replay(body(stream=True), CREDENTIALS)
    assert not replaying.done(), "a token's time is over, and not the answer's"
    release.set()
    assert (await replaying).status == 200
    await (await replaying).aclose()


async def test_a_replay_that_nobody_reads_is_closed(vllm: ScriptedVllm, upstream: Upstream) -> None:
    vllm.answers[CHAT] = streams(b"data: 1\n\n", then="hang")
    replayed = await upstream.replay(body(stream=True), CREDENTIALS)
    await replayed.aclose()
    await asyncio.wait_for(vllm.left.wait(), 1)


async def test_a_replay_that_breaks_off_says_so(vllm: ScriptedVllm, upstream: Upstream) -> None:
    vllm.answers[CHAT] = streams(b"data: 1\n\n", then="die")
    replayed = await upstream.replay(body(stream=True), CREDENTIALS)
    with pytest.raises(UpstreamUnavailable, match="broke off"):
        b"".join([chunk async for chunk in replayed.chunks()])
    await replayed.aclose()


def test_credentials_are_the_clients_bytes_and_nothing_else() -> None:
    headers = {"authorization": "Bearer \xff\xe9", "x-request-id": "r", "cookie": "c", "x-slo-class": "latency"}
    assert credentials_in(headers) == {b"authorization": b"Bearer \xff\xe9", b"x-request-id": b"r"}
    assert credentials_in({}) == {}


async def test_credentials_of_any_bytes_reach_every_call(vllm: ScriptedVllm, upstream: Upstream) -> None:
    odd = credentials_in({"authorization": "Bearer \xff"})
    vllm.answers = {TOKENIZE: answers({"tokens": [1]}), CHAT: answers({}), COMPLETIONS: streams(completion([4], "stop"))}
    await upstream.prompt_ids(body(), odd)
    await (await upstream.replay(body(), odd)).aclose()
    assert [batch async for batch in upstream.resume(plan(), [1], [2], 7, odd)]
    assert [asked.headers["authorization"].encode("utf-8", "surrogateescape") for asked in vllm.asked] == [b"Bearer \xff"] * 3


@pytest.mark.parametrize("value", [None, 1, "1", {}, [None], ["1"], [1.5], [True], [-1], [2**32], [[1]]])
def test_what_is_no_list_of_token_ids_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="no token ids"):
        read_token_ids(value)


def test_token_ids_are_read_as_they_are() -> None:
    assert read_token_ids([0, 5, 2**32 - 1]) == [0, 5, 2**32 - 1]
    assert read_token_ids([]) == []
