"""The gateway's own calls to vLLM, against a real HTTP server that misbehaves."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from gateway.body import Body
from gateway.endpoints import Endpoint
from gateway.tokens import Batch, TokenLogprobs
from gateway.upstream import Upstream, UpstreamUnavailable, credentials_in
from tests.kit.gateway import CREDENTIALS, body, chat
from tests.kit.legs import ScriptedVllm, answers, chat_chunk, completion, hangs, streams

CHAT, COMPLETIONS = Endpoint.CHAT, Endpoint.COMPLETIONS
TOKENIZE = "/tokenize"


@pytest.fixture
async def upstream(vllm: ScriptedVllm) -> AsyncIterator[Upstream]:
    async with Upstream(vllm.url, token_timeout_s=0.3, tokenize_timeout_s=0.3, generation_timeout_s=5) as client:
        yield client


async def told(upstream: Upstream, endpoint: Endpoint = COMPLETIONS) -> list[Batch]:
    async with aclosing(upstream.tokens(endpoint, b'{"stream":true}', CREDENTIALS)) as batches:
        return [batch async for batch in batches]


async def test_a_prompt_is_counted_with_the_clients_credentials(vllm: ScriptedVllm, upstream: Upstream) -> None:
    vllm.answers[TOKENIZE] = answers({"count": 2, "tokens": [5, 6]})
    assert await upstream.prompt_ids(b'{"prompt":"\\u00e9"}', CREDENTIALS) == [5, 6]
    (asked,) = vllm.asked
    assert asked.headers["authorization"] == "Bearer client"
    assert asked.headers["x-request-id"] == "r1"
    assert asked.headers["content-type"] == "application/json"
    assert asked.body == b'{"prompt":"\\u00e9"}'


@pytest.mark.parametrize("status", [400, 401, 404, 422])
async def test_a_prompt_that_vllm_refuses_has_no_ids(vllm: ScriptedVllm, upstream: Upstream, status: int) -> None:
    vllm.answers[TOKENIZE] = answers({"error": {}}, status)
    assert await upstream.prompt_ids(b"{}", CREDENTIALS) is None


RUBBISH = [
    *(b"", b"x", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"tokens":null}', b'{"tokens":5}', b'{"tokens":["a"]}'),
    *(b'{"tokens":[-1]}', b'{"tokens":[1e999]}', b'{"tokens":[4294967296]}', b'{"tokens":{"1":2}}', b'{"tokens":[true]}'),
]


async def test_a_count_that_is_none_counts_as_no_answer(vllm: ScriptedVllm, upstream: Upstream) -> None:
    for raw in RUBBISH:
        vllm.answers[TOKENIZE] = answers(raw)
        with pytest.raises(UpstreamUnavailable, match="/tokenize"):
            await upstream.prompt_ids(b"{}", CREDENTIALS)


async def test_a_proxy_of_the_environment_does_not_hear_of_calls_inside_the_lane(
    vllm: ScriptedVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    vllm.answers[TOKENIZE] = answers({"tokens": [1]})
    async with Upstream(vllm.url, token_timeout_s=1, tokenize_timeout_s=1, generation_timeout_s=1) as upstream:
        assert await upstream.prompt_ids(b"{}", CREDENTIALS) == [1]


async def test_a_count_that_does_not_come_or_breaks_is_given_up_in_time(vllm: ScriptedVllm, upstream: Upstream) -> None:
    for handler in (hangs, streams(b'{"tok', then="hang"), streams(b'{"tok', then="die"), answers({}, 503)):
        vllm.answers[TOKENIZE] = handler
        async with asyncio.timeout(3):
            with pytest.raises(UpstreamUnavailable, match="/tokenize"):
                await upstream.prompt_ids(b"{}", CREDENTIALS)


async def test_where_nobody_listens_every_call_says_so() -> None:
    async with Upstream("http://127.0.0.1:1", token_timeout_s=1, tokenize_timeout_s=1, generation_timeout_s=1) as nobody:
        with pytest.raises(UpstreamUnavailable):
            await nobody.prompt_ids(b"{}", CREDENTIALS)
        with pytest.raises(UpstreamUnavailable):
            await nobody.replay(CHAT, body(), CREDENTIALS)
        with pytest.raises(UpstreamUnavailable):
            await told(nobody)
        with pytest.raises(UpstreamUnavailable):
            await nobody.post(CHAT, b"{}", CREDENTIALS, 1)


async def test_tokens_are_asked_for_as_the_client_and_read_up_to_their_finish(vllm: ScriptedVllm, upstream: Upstream) -> None:
    vllm.answers[COMPLETIONS] = streams(completion([4]), completion([5, 6], "length"), completion([7]), b"data: [DONE]\n\n")
    assert await told(upstream) == [Batch((4,)), Batch((5, 6), "length")]
    (asked,) = vllm.asked
    assert asked.headers["authorization"] == "Bearer client"
    assert asked.headers["content-type"] == "application/json"
    assert asked.body == b'{"stream":true}'


async def test_tokens_of_a_chat_begin_after_its_role(vllm: ScriptedVllm, upstream: Upstream) -> None:
    vllm.answers[CHAT] = streams(chat_chunk(None), chat_chunk([4], text="a"), chat_chunk([]), chat_chunk([5], "stop"))
    assert await told(upstream, CHAT) == [Batch((4,)), Batch((5,), "stop")]


async def test_logprobs_are_read_with_their_tokens(vllm: ScriptedVllm, upstream: Upstream) -> None:
    columns = {"tokens": ["token_id:4"], "token_logprobs": [-1.5], "top_logprobs": [{"token_id:4": -1.5, "token_id:9": -2.0}]}
    entry = {"token": "token_id:4", "logprob": -1.5}
    other = {"token": "token_id:9", "logprob": -2.0}
    vllm.answers = {
        COMPLETIONS: streams(completion([4], "stop", logprobs=columns)),
        CHAT: streams(chat_chunk([4], "stop", logprobs={"content": [{**entry, "top_logprobs": [entry, other]}]})),
    }
    for endpoint in Endpoint:
        assert await told(upstream, endpoint) == [Batch((4,), "stop", (TokenLogprobs(-1.5, ((4, -1.5), (9, -2.0))),))]


@pytest.mark.parametrize(
    "logprobs",
    [
        {},
        {"tokens": ["token_id:5"], "token_logprobs": [-1.5], "top_logprobs": [{}]},
        {"tokens": ["a"], "token_logprobs": [-1.5], "top_logprobs": [{}]},
        {"tokens": [], "token_logprobs": [], "top_logprobs": []},
    ],
)
async def test_logprobs_of_other_tokens_are_none(vllm: ScriptedVllm, upstream: Upstream, logprobs: Any) -> None:
    vllm.answers[COMPLETIONS] = streams(completion([4], "stop", logprobs=logprobs))
    with pytest.raises(UpstreamUnavailable):
        await told(upstream)


async def test_text_with_line_separators_and_cuts_inside_characters_is_read(vllm: ScriptedVllm, upstream: Upstream) -> None:
    whole = completion([4], text="a\u2028b\x85c🙂") + completion([5], "stop").replace(b"\n", b"\r\n")
    vllm.answers[COMPLETIONS] = streams(*(whole[i : i + 1] for i in range(len(whole))))
    assert await told(upstream) == [Batch((4,)), Batch((5,), "stop")]


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
        (b"data: " + b"[" * 100_000 + b"\n\n",),
        (b"data: \xff\n\n",),
        (b'data: {"choices":[{"finish_reason":null,"token_ids":[1]},{"finish_reason":null,"token_ids":[1]}]}\n\n',),
    ],
)
async def test_an_answer_that_vllm_does_not_finish_is_lost(
    vllm: ScriptedVllm, upstream: Upstream, chunks: tuple[bytes, ...]
) -> None:
    vllm.answers[COMPLETIONS] = streams(*chunks)
    with pytest.raises(UpstreamUnavailable, match="/v1/completions"):
        await told(upstream)


@pytest.mark.parametrize(
    "chunks",
    [
        (chat_chunk(None, text="a"),),
        (chat_chunk(None, "stop"),),
        (b'data: {"choices":[{"finish_reason":null,"delta":{"content":"a"}}]}\n\n',),
    ],
)
async def test_a_chat_that_does_not_tell_its_tokens_is_lost(
    vllm: ScriptedVllm, upstream: Upstream, chunks: tuple[bytes, ...]
) -> None:
    vllm.answers[CHAT] = streams(*chunks, chat_chunk([5], "stop"))
    with pytest.raises(UpstreamUnavailable, match="/v1/chat/completions"):
        await told(upstream, CHAT)


async def test_tokens_that_are_refused_stall_or_die_are_lost_in_time(vllm: ScriptedVllm, upstream: Upstream) -> None:
    for handler in (answers({}, 400), answers({}, 503), streams(completion([4]), then="hang"), streams(then="die"), hangs):
        vllm.answers[COMPLETIONS] = handler
        async with asyncio.timeout(3):
            with pytest.raises(UpstreamUnavailable, match="/v1/completions"):
                await told(upstream)


async def test_tokens_that_are_no_longer_wanted_stop_at_vllm(vllm: ScriptedVllm, upstream: Upstream) -> None:
    vllm.answers[COMPLETIONS] = streams(completion([4]), then="hang")
    async with aclosing(upstream.tokens(COMPLETIONS, b"{}", CREDENTIALS)) as batches:
        assert await anext(batches) == Batch((4,))
    await asyncio.wait_for(vllm.left.wait(), 1)


@pytest.mark.parametrize("endpoint", Endpoint)
async def test_a_request_is_replayed_byte_for_byte_and_its_answer_too(
    vllm: ScriptedVllm, upstream: Upstream, endpoint: Endpoint
) -> None:
    raw = b' { "model":"tiny", "messages":[], "x": 1.0 } '
    vllm.answers[endpoint] = answers(b"\x00any bytes", 418, "text/odd")
    replayed = await upstream.replay(endpoint, Body(raw), CREDENTIALS)
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
    replaying = asyncio.create_task(upstream.replay(CHAT, Body(json.dumps(chat()).encode()), CREDENTIALS))
    with pytest.raises(UpstreamUnavailable):
        await upstream.replay(CHAT, body(stream=True), CREDENTIALS)
    assert not replaying.done(), "a token's time is over, and not the answer's"
    release.set()
    assert (await replaying).status == 200
    await (await replaying).aclose()


async def test_a_replay_that_nobody_reads_is_closed(vllm: ScriptedVllm, upstream: Upstream) -> None:
    vllm.answers[CHAT] = streams(b"data: 1\n\n", then="hang")
    replayed = await upstream.replay(CHAT, body(stream=True), CREDENTIALS)
    await replayed.aclose()
    await asyncio.wait_for(vllm.left.wait(), 1)


async def test_a_replay_that_breaks_off_says_so(vllm: ScriptedVllm, upstream: Upstream) -> None:
    vllm.answers[CHAT] = streams(b"data: 1\n\n", then="die")
    replayed = await upstream.replay(CHAT, body(stream=True), CREDENTIALS)
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
    await upstream.prompt_ids(b"{}", odd)
    await (await upstream.replay(CHAT, body(), odd)).aclose()
    assert [batch async for batch in upstream.tokens(COMPLETIONS, b"{}", odd)]
    await upstream.post(CHAT, b"{}", odd, 1)
    assert [asked.headers["authorization"].encode("utf-8", "surrogateescape") for asked in vllm.asked] == [b"Bearer \xff"] * 4


async def test_any_answer_to_a_post_is_told_and_none_is_waited_for_too_long(vllm: ScriptedVllm, upstream: Upstream) -> None:
    vllm.answers["/render"] = answers(b"refused", 418)
    assert await upstream.post("/render", b"{}", CREDENTIALS, 1) == (418, b"refused")
    for handler in (hangs, streams(b"{", then="hang"), streams(b"{", then="die")):
        vllm.answers["/render"] = handler
        async with asyncio.timeout(3):
            with pytest.raises(UpstreamUnavailable, match="/render"):
                await upstream.post("/render", b"{}", CREDENTIALS, 0.2)
