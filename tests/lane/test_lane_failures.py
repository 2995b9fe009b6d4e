"""What clients see when a part of the lane is killed, stopped or cut off."""

import asyncio
import os
import signal
import time

import httpx
import pytest

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


async def test_ext_proc_lost_between_rewrite_and_answer_never_passes_the_one_token_answer(breakable_lane: LaneStack) -> None:
    lane = breakable_lane
    lane.vllm.script.delay_s = 1.0
    request = asyncio.create_task(lane.post(chat()))
    await until(lambda: bool(lane.vllm.requests), "prefill has begun")
    assert lane.extproc is not None
    lane.extproc.kill()
    answer = await request
    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "lane_lost"
    await lane.all_free()


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
    assert lane.extproc is not None
    lane.extproc.kill()
    answer = await request
    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "lane_lost"
    await lane.all_free()


async def test_redis_lost_in_mid_stream_costs_running_streams_nothing_and_new_ones_the_lane(breakable_lane: LaneStack) -> None:
    lane = breakable_lane
    lane.daemon.script.interval_s = 0.3
    running = asyncio.create_task(lane.post(chat(stream=True)))
    await until(lambda: bool(lane.daemon.requests), "decode has begun")
    lane.redis.stop()
    answer = await lane.post(chat())
    assert answer.json()["choices"][0]["message"]["content"] == "plain"
    assert answer.headers["x-slo-reason"] == "leases_unavailable"
    assert (await running).text.rstrip().endswith("[DONE]")
    lane.redis.start()
    lane.daemon.script.interval_s = 0.0

    async def served_again() -> bool:
        return (await lane.post(chat())).headers["x-slo-lane"] == "latency"

    await until(served_again, "the lane is back after Redis", 5)


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
