"""A stream that vLLM cannot go on with exactly goes on at another daemon, from a second prefill of all there is so far."""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from typing import Any

import pytest
from aiohttp import web

from gateway.endpoints import Endpoint
from handoff import decode_pb2 as pb
from handoff.claim import from_params
from leases import LeaseTable
from tests.kit.gateway import MODEL, PROMPT, bpe_tokenizer, handed_over
from tests.kit.legs import ScriptedDaemon, ScriptedVllm, Step, answers, failed, hangs, landed, reserved, tokens
from tests.kit.relay import (
    CHAT,
    COMPLETIONS,
    END,
    FAILED_NODE,
    FIRST,
    MID_STREAM,
    REST,
    SO_FAR,
    TEXT,
    Relayed,
    answer_of_vllm,
    body_of,
    decoded,
    events,
    lost,
    relayed,
    said,
)
from tests.kit.valkey import eventually

NOT_VLLMS: dict[str, Any] = {"stream": True, "presence_penalty": 0.5, "max_tokens": 50}
"""What vLLM cannot go on with: to it, the answer so far would be prompt."""

DIES = [*MID_STREAM, "die"]


def prefilled(first: int = SO_FAR[-1], **over: Any) -> dict[str, Any]:
    """vLLM's answer to the second prefill."""
    return {"choices": [], "kv_transfer_params": handed_over(first), **over}


def goes_on(so_far: Sequence[int] = SO_FAR, prompt: Sequence[int] = PROMPT) -> list[Step]:
    """A second daemon that has landed prompt and answer so far, and decodes the rest."""
    rest = [FIRST, *REST, END][len(so_far) :]
    return [reserved(), landed(so_far[-1], [*prompt, *so_far[:-1]]), *decoded(rest)]


async def all_free(table: LeaseTable) -> None:
    async def free() -> bool:
        view = (await table.pools()).get(MODEL)
        return view is not None and view.free_slots == 1

    await eventually(free, within_s=1)


@pytest.mark.parametrize("endpoint", Endpoint)
async def test_another_daemon_goes_on_after_the_tokens_so_far(redis_url: str, vllm: ScriptedVllm, endpoint: Endpoint) -> None:
    vllm.answers[COMPLETIONS] = answers(prefilled())
    fields = {**NOT_VLLMS, "stop_token_ids": [5], "min_tokens": 2, "cache_salt": "tenant", "priority": 3}
    async with (
        ScriptedDaemon(goes_on()).registered(redis_url) as second,
        relayed(DIES, vllm, endpoint=endpoint, redis_url=redis_url, **fields) as served,
    ):
        assert said(await body_of(served, answer_of_vllm(endpoint=endpoint))) == (TEXT, "stop")
        assert served.relay.outcome == "resumed"
        assert served.value("anchorleg_resumed_total", reason="unreachable", way="daemon") == 1
        assert served.value("anchorleg_tokens_total") == len(REST) + 2
        (asked,) = vllm.asked
        assert asked.headers["authorization"] == "Bearer client"
        request = asked.json()
        signed = from_params(request.pop("kv_transfer_params"))
        assert request == {
            "model": MODEL,
            "prompt": [*PROMPT, *SO_FAR[:-1]],
            "max_tokens": 1,
            "temperature": 0,
            "allowed_token_ids": SO_FAR[-1:],
            "ignore_eos": True,
            "cache_salt": "tenant",
            "priority": 3,
        }
        (decode,) = second.requests
        assert signed is not None
        claim = served.parts.keys.verify(signed)
        assert (decode.handoff_id, decode.slot, decode.epoch) == (claim.handoff_id, claim.slot, claim.epoch)
        assert (decode.answered, decode.max_tokens) == (len(SO_FAR) - 1, 50 - len(SO_FAR) + 1)
        assert (decode.presence_penalty, decode.min_tokens, list(decode.stop_token_ids)) == (0.5, 2, [5, END])
        await all_free(served.parts.table)


async def test_a_second_prefill_is_a_request_that_vllm_accepts(redis_url: str, vllm: ScriptedVllm, oracle: Any) -> None:
    vllm.answers[COMPLETIONS] = answers(prefilled())
    async with (
        ScriptedDaemon(goes_on()).registered(redis_url),
        relayed(DIES, vllm, redis_url=redis_url, **NOT_VLLMS) as served,
    ):
        await body_of(served, answer_of_vllm())
    asked = oracle.CompletionRequest.model_validate(vllm.asked[0].json())
    sampling = asked.to_sampling_params(1, {})
    assert (sampling.max_tokens, sampling.allowed_token_ids, sampling.ignore_eos) == (1, SO_FAR[-1:], True)


BEFORE_ITS_FIRST_STEP: dict[str, list[Step]] = {
    "dies before it landed": ["die"],
    "never lands": ["hang"],
    "dies when it has landed": [landed(FIRST), "die"],
    "is busy with another request": [landed(FIRST), "hang"],
    "has no grammar after all": [landed(FIRST), failed("grammar_failed")],
}


@pytest.mark.parametrize("script", BEFORE_ITS_FIRST_STEP.values(), ids=BEFORE_ITS_FIRST_STEP.keys())
async def test_the_first_token_waits_for_the_daemons_step_so_that_vllm_can_serve_all_of_it_in_its_place(
    redis_url: str, vllm: ScriptedVllm, script: list[Step]
) -> None:
    vllm.answers[CHAT] = answers(b"data: own\n\n", content_type="text/event-stream")
    async with (
        ScriptedDaemon(goes_on([FIRST])).registered(redis_url) as second,
        relayed(script, vllm, redis_url=redis_url, **NOT_VLLMS) as served,
    ):
        assert await body_of(served, answer_of_vllm()) == b"data: own\n\n"
        assert served.relay.outcome == "resumed"
        assert second.requests == []


async def test_a_client_that_leaves_while_the_first_token_waits_frees_the_slot(vllm: ScriptedVllm) -> None:
    async with relayed([landed(FIRST), "hang"], vllm, **NOT_VLLMS) as served:
        answering = asyncio.create_task(served.relay.answer(answer_of_vllm()))
        await asyncio.wait([answering], timeout=0.05)
        answering.cancel()
        await asyncio.wait([answering], timeout=5)
        await served.relay.aclose()
        await asyncio.wait_for(served.daemon.cancelled.wait(), 1)


async def test_a_stop_string_may_begin_at_one_daemon_and_end_at_the_other(redis_url: str, vllm: ScriptedVllm) -> None:
    vllm.answers[COMPLETIONS] = answers(prefilled())
    text_so_far = bpe_tokenizer().decode(SO_FAR)
    stop = text_so_far[-2:] + TEXT[len(text_so_far) :][:2]
    async with (
        ScriptedDaemon([*goes_on()[:-1], "hang"]).registered(redis_url) as second,
        relayed(DIES, vllm, redis_url=redis_url, stop=[stop], **NOT_VLLMS) as served,
    ):
        assert said(await body_of(served, answer_of_vllm())) == (text_so_far[:-2], "stop")
        await asyncio.wait_for(second.cancelled.wait(), 1)


async def test_a_gateway_that_drains_still_finds_another_daemon(redis_url: str, vllm: ScriptedVllm) -> None:
    vllm.answers[COMPLETIONS] = answers(prefilled())
    async with (
        ScriptedDaemon(goes_on()).registered(redis_url),
        relayed(DIES, vllm, redis_url=redis_url, **NOT_VLLMS) as served,
    ):
        served.parts.slots.drain()
        assert said(await body_of(served, answer_of_vllm())) == (TEXT, "stop")


async def test_the_daemon_that_failed_is_not_asked_again(redis_url: str, vllm: ScriptedVllm) -> None:
    async with (
        ScriptedDaemon(goes_on()).registered(redis_url, node_id=FAILED_NODE) as same,
        relayed(DIES, vllm, redis_url=redis_url, **NOT_VLLMS) as served,
    ):
        assert lost(await body_of(served, answer_of_vllm()))
        assert same.requests == []
        assert served.relay.outcome == "failed"


async def test_an_answer_of_which_nothing_was_sent_takes_no_second_slot(redis_url: str, vllm: ScriptedVllm) -> None:
    vllm.answers["/v1/chat/completions"] = answers({"own": 1})
    async with (
        ScriptedDaemon(goes_on()).registered(redis_url) as second,
        relayed(DIES, vllm, redis_url=redis_url, **NOT_VLLMS | {"stream": False}) as served,
    ):
        assert json.loads(await body_of(served, answer_of_vllm())) == {"own": 1}
        assert second.requests == []


SECOND_PREFILLS = {
    "refused": answers({"error": {}}, 400),
    "broken": answers({}, 503),
    "no json": answers(b"<html>"),
    "nested": answers(b"[" * 100_000),
    "not taken": answers(prefilled(kv_transfer_params=None)),
    "another token": answers(prefilled(SO_FAR[-1] + 1)),
    "never": hangs,
}


@pytest.mark.parametrize("handler", SECOND_PREFILLS.values(), ids=SECOND_PREFILLS.keys())
async def test_a_second_prefill_that_fails_gives_its_slot_back(redis_url: str, vllm: ScriptedVllm, handler: Any) -> None:
    vllm.answers[COMPLETIONS] = handler
    async with (
        ScriptedDaemon([reserved(), "hang"]).registered(redis_url) as second,
        relayed(DIES, vllm, redis_url=redis_url, **NOT_VLLMS) as served,
    ):
        assert lost(await body_of(served, answer_of_vllm()))
        await asyncio.wait_for(second.cancelled.wait(), 1)
        await all_free(served.parts.table)
        assert served.value("anchorleg_resumed_total", reason="unreachable", way="daemon") == 1


SECOND_DAEMONS: dict[str, list[Step]] = {
    "refuses": [failed("slot_busy")],
    "never lands": [reserved(), "hang"],
    "lands another prompt": [reserved(), landed(SO_FAR[-1], PROMPT), "hang"],
    "lands another token": [reserved(), landed(FIRST, [*PROMPT, *SO_FAR[:-1]]), "hang"],
    "fails in mid-stream": [*goes_on()[:3], failed("engine_failed")],
    "sends too much": [*goes_on()[:2], tokens(1, *[1] * 60), "hang"],
}


@pytest.mark.parametrize("script", SECOND_DAEMONS.values(), ids=SECOND_DAEMONS.keys())
async def test_a_second_daemon_that_fails_is_the_last_one(redis_url: str, vllm: ScriptedVllm, script: list[Step]) -> None:
    vllm.answers[COMPLETIONS] = answers(prefilled())
    async with (
        ScriptedDaemon(script, slots=1).registered(redis_url) as second,
        relayed(DIES, vllm, redis_url=redis_url, **NOT_VLLMS) as served,
    ):
        assert lost(await body_of(served, answer_of_vllm()))
        assert len(second.requests) == 1
        await all_free(served.parts.table)


async def test_a_lease_table_that_is_away_is_one_way_less(vllm: ScriptedVllm) -> None:
    async with relayed(DIES, vllm, **NOT_VLLMS) as served:
        assert lost(await body_of(served, answer_of_vllm()))
        assert vllm.asked == []


async def test_a_client_that_leaves_while_another_daemon_decodes_frees_its_slot(redis_url: str, vllm: ScriptedVllm) -> None:
    vllm.answers[COMPLETIONS] = answers(prefilled())
    async with (
        ScriptedDaemon([*goes_on()[:3], "hang"]).registered(redis_url) as second,
        relayed(DIES, vllm, redis_url=redis_url, **NOT_VLLMS) as served,
    ):
        got = await served.relay.answer(answer_of_vllm())
        for _ in range(len(SO_FAR) + 1):
            await anext(got.chunks)
        await got.chunks.aclose()
        await asyncio.wait_for(second.cancelled.wait(), 1)
        await all_free(served.parts.table)


async def test_a_client_that_leaves_during_the_second_prefill_stops_it_and_frees_the_slot(
    redis_url: str, vllm: ScriptedVllm
) -> None:
    begun = asyncio.Event()

    async def never(request: web.Request) -> web.StreamResponse:
        begun.set()
        return await hangs(request)

    vllm.answers[COMPLETIONS] = never
    async with (
        ScriptedDaemon([reserved(), "hang"]).registered(redis_url) as second,
        relayed(DIES, vllm, redis_url=redis_url, **NOT_VLLMS) as served,
    ):
        reading = asyncio.create_task(read_all(served))
        await asyncio.wait_for(begun.wait(), 5)
        reading.cancel()
        await asyncio.wait([reading], timeout=5)
        await asyncio.wait_for(vllm.left.wait(), 1)
        await asyncio.wait_for(second.cancelled.wait(), 1)
        await all_free(served.parts.table)


async def test_a_client_that_leaves_at_any_time_leaves_no_slot_behind(redis_url: str, vllm: ScriptedVllm) -> None:
    chance = random.Random(1)
    vllm.answers[COMPLETIONS] = answers(prefilled())
    async with ScriptedDaemon(goes_on()).registered(redis_url):
        took = 0.0
        for left in range(25):
            async with relayed(DIES, vllm, redis_url=redis_url, **NOT_VLLMS) as served:
                began = time.perf_counter()
                reading = asyncio.create_task(read_all(served))
                if left == 0:
                    await reading
                    took = time.perf_counter() - began
                await asyncio.wait([reading], timeout=chance.uniform(0, took))
                reading.cancel()
                await asyncio.wait([reading], timeout=5)
                assert reading.done()
                await served.parts.slots.settle()
                await all_free(served.parts.table)


async def read_all(served: Relayed) -> None:
    got = await served.relay.answer(answer_of_vllm())
    try:
        async for _ in got.chunks:
            pass
    finally:
        await got.chunks.aclose()


async def test_logprobs_go_on_at_the_other_daemon(redis_url: str, vllm: ScriptedVllm) -> None:
    vllm.answers[COMPLETIONS] = answers(prefilled(REST[0]))
    told = [[pb.TokenLogprobs(logprob=logprob)] for logprob in (-2.0, -3.0)]
    begun: list[Step] = [landed(FIRST), tokens(1, REST[0], logprobs=told[0]), "die"]
    second = [reserved(), landed(REST[0], [*PROMPT, FIRST]), tokens(1, END, finish=pb.Tokens.STOP, logprobs=told[1])]
    first = json.loads(answer_of_vllm())
    entry = {"token": f"token_id:{FIRST}", "logprob": -1.0, "top_logprobs": []}
    first["choices"][0]["logprobs"] = {"content": [entry]}
    async with (
        ScriptedDaemon(second).registered(redis_url),
        relayed(begun, vllm, redis_url=redis_url, logprobs=True, **NOT_VLLMS) as served,
    ):
        read = events(await body_of(served, json.dumps(first).encode()))
    choices = [event["choices"][0] for event in read if event != b"[DONE]"]
    content = [entry["logprob"] for choice in choices for entry in (choice["logprobs"] or {}).get("content", ())]
    assert content == [-1.0, -2.0, -3.0]
