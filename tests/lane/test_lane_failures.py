"""What clients see when a part of the lane is killed, stopped or cut off."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from benchmarks.fakes import END, MODEL, card_name
from gateway.decode_client import DecodeClient
from handoff import decode_pb2 as pb
from leases import Grant, SlotRequest
from tests.kit.lane import LATENCY, MESSAGE_TIMEOUT_S, LaneStack, chat, until

STREAM_HEADERS = {**LATENCY, "content-type": "application/json"}


async def test_without_ext_proc_plain_vllm_serves(breakable_lane: LaneStack) -> None:
    lane = breakable_lane
    assert (await lane.post(chat())).json()["choices"][0]["message"]["content"] == "Hello"
    assert lane.extproc is not None
    lane.extproc.kill()
    lane.extproc.wait(10)
    for _ in range(5):
        answer = await lane.post(chat())
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["message"]["content"] == "plain"


async def test_a_hung_ext_proc_delays_requests_by_no_more_than_envoys_limit(breakable_lane: LaneStack) -> None:
    lane = breakable_lane
    assert lane.extproc is not None
    os.kill(lane.extproc.pid, signal.SIGSTOP)
    began = time.monotonic()
    try:
        answer = await lane.post(chat())
    finally:
        os.kill(lane.extproc.pid, signal.SIGCONT)
    assert time.monotonic() - began < MESSAGE_TIMEOUT_S + 5
    assert answer.json()["choices"][0]["message"]["content"] == "plain"


async def lost(lane: LaneStack, request: "asyncio.Task[httpx.Response]") -> None:
    """Kill ext_proc: the request's client hears of it in OpenAI's form, and nothing stays held."""
    assert lane.extproc is not None
    lane.extproc.kill()
    answer = await request
    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "lane_lost"
    await lane.all_free()


async def test_ext_proc_lost_between_rewrite_and_answer_never_passes_the_one_token_answer(breakable_lane: LaneStack) -> None:
    lane = breakable_lane
    lane.vllm.script.delay_s = 1.0
    request = asyncio.create_task(lane.post(chat()))
    await until(lambda: bool(lane.vllm.requests), "prefill has begun")
    await lost(lane, request)


async def test_ext_proc_lost_in_mid_stream_breaks_the_transfer(breakable_lane: LaneStack) -> None:
    lane = breakable_lane
    lane.daemon.script.hang_after = 2
    received: list[str] = []

    async def read() -> None:
        async with lane.client.stream(
            "POST", "/v1/chat/completions", json=chat(stream=True), headers=STREAM_HEADERS
        ) as response:
            async for text in response.aiter_text():
                received.append(text)

    reading = asyncio.create_task(read())
    await until(lambda: '"content":"l"' in "".join(received), "the stream has begun")
    assert lane.extproc is not None
    lane.extproc.kill()
    with pytest.raises(httpx.RemoteProtocolError):
        await reading
    assert "[DONE]" not in "".join(received)
    await lane.all_free()


async def test_ext_proc_lost_while_a_whole_answer_is_decoded_is_an_error_in_openais_form(breakable_lane: LaneStack) -> None:
    lane = breakable_lane
    lane.daemon.script.hang_after = 2
    request = asyncio.create_task(lane.post(chat()))
    await until(lambda: bool(lane.daemon.requests and lane.vllm.requests), "both legs have the request")
    await asyncio.wait([request], timeout=0.5)  # vLLM's answer is with ext_proc by then
    await lost(lane, request)


async def test_redis_stopped_and_started_in_the_middle_of_traffic(breakable_lane: LaneStack) -> None:
    lane = breakable_lane
    lane.daemon.script.tokens, lane.daemon.script.interval_s = [*b"x" * 200, END], 0.1
    running = asyncio.create_task(lane.post(chat(stream=True, max_tokens=300)))
    await until(lambda: bool(lane.daemon.requests), "decode has begun")
    stream = lane.daemon.requests[0]
    answers: list[httpx.Response] = []

    async def keep_asking() -> None:
        in_turn = {**LATENCY, "x-slo-max-wait-ms": "5000"}  # the last answer's slot may not be free yet
        while True:
            answers.append(await lane.post(chat(max_tokens=2), in_turn))

    def last_reason() -> str:
        return answers[-1].headers["x-slo-reason"] if answers else ""

    async def whole() -> bool:
        pool = (await lane.table.inspect()).get(MODEL)
        if pool is None:
            return False
        (daemon,) = pool.nodes
        return daemon.node == lane.daemon.node and daemon.slots[stream.slot].epoch == stream.epoch

    asking = asyncio.create_task(keep_asking())
    await until(lambda: last_reason() == "ok", "the lane serves beside the stream")
    lane.redis.stop()
    await until(lambda: last_reason() == "leases_unavailable", "vLLM stands in")
    lane.redis.start()
    await until(whole, "the table has the daemon and the stream's lease again")
    await until(lambda: last_reason() == "ok", "the lane serves again")
    assert not running.done()
    lane.daemon.script.interval_s = 0.0
    text = (await running).text
    assert (text.count('"content":"x"'), text.rstrip().endswith("[DONE]")) == (200, True)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert {answer.status_code for answer in answers} == {200}
    # An empty table knows no daemon until the first heartbeat.
    assert {answer.headers["x-slo-reason"] for answer in answers} <= {"ok", "leases_unavailable", "no_daemon"}
    await lane.all_free()


async def test_a_daemon_that_drains_finishes_its_stream_and_gets_no_other(breakable_lane: LaneStack) -> None:
    lane = breakable_lane
    lane.daemon.script.interval_s = 0.1
    running = asyncio.create_task(lane.post(chat(stream=True)))
    await until(lambda: bool(lane.daemon.requests), "decode has begun")
    lane.daemon.drain()

    async def left_to_vllm() -> bool:
        return (await lane.post(chat(max_tokens=2))).headers["x-slo-reason"] == "no_daemon"

    await until(left_to_vllm, "new requests go to vLLM")
    denied = await lane.post(chat(), {**LATENCY, "x-slo-fallback": "deny"})
    assert denied.status_code == 503
    assert (await running).text.rstrip().endswith("[DONE]")


@asynccontextmanager
async def occupied(lane: LaneStack) -> AsyncIterator[None]:
    """Streams that belong to no gateway hold every slot."""
    lane.daemon.script.hang_after = 0
    card = card_name(lane.daemon.context_tokens)
    async with DecodeClient() as client:
        for _ in range(lane.daemon.slots):
            wish = SlotRequest(pool=MODEL, card=card, tokens=16, lease_ms=60_000)
            grant = await lane.table.acquire(wish)
            assert isinstance(grant, Grant), grant
            request = pb.DecodeRequest(handoff_id=grant.nonce, slot=grant.slot, epoch=grant.epoch)
            await client.reserve(grant.decode_endpoint, request, 5.0)
        yield


async def in_line(lane: LaneStack) -> "asyncio.Task[httpx.Response]":
    """A request that waits for a slot."""
    request = asyncio.create_task(lane.post(chat(), {**LATENCY, "x-slo-max-wait-ms": "5000"}))
    await until(lambda: stand_in_line(lane, 1), "the request waits for a slot")
    return request


async def stand_in_line(lane: LaneStack, requests: int) -> bool:
    return (await lane.table.pools())[MODEL].waiting == requests


async def test_a_request_whose_gateway_dies_in_the_queue_leaves_no_trace_there(breakable_lane: LaneStack) -> None:
    lane = breakable_lane
    async with occupied(lane):
        request = await in_line(lane)
        assert lane.extproc is not None
        lane.extproc.kill()
        assert (await request).json()["choices"][0]["message"]["content"] == "plain"
        await until(lambda: stand_in_line(lane, 0), "the dead gateway's place is gone", 2)
    await lane.all_free()


async def test_a_request_that_waits_when_its_gateway_is_stopped_goes_to_vllm_at_once(breakable_lane: LaneStack) -> None:
    lane = breakable_lane
    async with occupied(lane):
        request = await in_line(lane)
        assert lane.extproc is not None
        lane.extproc.terminate()
        answer = await asyncio.wait_for(request, 2)
        assert answer.headers["x-slo-reason"] == "draining"
        assert answer.json()["choices"][0]["message"]["content"] == "plain"
        assert await stand_in_line(lane, 0)
    await lane.all_free()


async def test_an_error_of_vllm_in_prefill_passes_and_the_slot_is_free(breakable_lane: LaneStack) -> None:
    lane = breakable_lane
    lane.vllm.script.status = 503
    answer = await lane.post(chat())
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == 503
    await lane.all_free()


async def test_sigterm_lets_running_streams_finish(breakable_lane: LaneStack) -> None:
    lane = breakable_lane
    lane.daemon.script.interval_s = 0.2
    request = asyncio.create_task(lane.post(chat(stream=True)))
    await until(lambda: bool(lane.daemon.requests), "decode has begun")
    assert lane.extproc is not None
    lane.extproc.terminate()
    assert (await request).text.rstrip().endswith("[DONE]")
