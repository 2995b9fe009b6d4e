"""Requests that wait for a slot, through the real Envoy: none is sent on early, and a client that leaves leaves the line."""

import asyncio
import time
from typing import Any

import pytest

from benchmarks.fake_daemon import DaemonScript
from benchmarks.fakes import MODEL
from tests.kit.lane import LATENCY, MESSAGE_TIMEOUT_S, LaneStack, chat, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATIENT = {**LATENCY, "x-slo-max-wait-ms": "9000"}


async def occupied(lane: LaneStack) -> "list[asyncio.Task[None]]":
    """Requests that hold every slot, each in mid-stream, until they are cancelled; later ones are served as ever."""
    lane.daemon.script.hang_after = 2
    begun: list[str] = []

    async def hold() -> None:
        async with lane.client.stream("POST", "/v1/chat/completions", json=chat(stream=True), headers=LATENCY) as answer:
            assert answer.headers["x-slo-reason"] == "ok"
            async for text in answer.aiter_text():
                if '"content":"l"' in text:
                    begun.append(text)

    held = [asyncio.create_task(hold()) for _ in range(lane.daemon.slots)]
    await until(lambda: len(begun) == lane.daemon.slots or any(task.done() for task in held), "every slot is taken")
    assert not any(task.done() for task in held), held
    lane.daemon.script = DaemonScript()
    return held


async def left(*requests: "asyncio.Task[Any]") -> None:
    """Let these clients go."""
    for request in requests:
        request.cancel()
    await asyncio.wait(requests, timeout=5)
    assert all(request.cancelled() for request in requests)


async def queue(lane: LaneStack, length: int) -> None:
    """Wait until so many requests stand in line."""

    async def holds() -> bool:
        return len((await lane.table.inspect())[MODEL].queue) == length

    await until(holds, f"{length} in line")


async def test_a_request_may_wait_longer_than_envoys_own_limit_on_decisions(lane: LaneStack) -> None:
    held = await occupied(lane)
    request = asyncio.create_task(lane.post(chat(), PATIENT))
    await queue(lane, 1)
    await asyncio.wait([request], timeout=MESSAGE_TIMEOUT_S + 1)
    assert not request.done()
    await left(held[0])
    answer = await request
    assert answer.headers["x-slo-lane"] == "latency"
    assert answer.json()["choices"][0]["message"]["content"] == "Hello"
    slot_ms = next(part for part in answer.headers["server-timing"].split(", ") if part.startswith("slot;"))
    assert float(slot_ms.partition("dur=")[2]) > MESSAGE_TIMEOUT_S * 1000
    await left(held[1])


async def test_a_wait_that_was_in_vain_ends_with_plain_vllm_or_429(lane: LaneStack) -> None:
    held = await occupied(lane)
    began = time.monotonic()
    allowed = await lane.post(chat(), {**LATENCY, "x-slo-max-wait-ms": "300"})
    assert 0.3 <= time.monotonic() - began < MESSAGE_TIMEOUT_S
    assert (allowed.headers["x-slo-lane"], allowed.headers["x-slo-reason"]) == ("throughput", "no_free_slot")
    assert allowed.json()["choices"][0]["message"]["content"] == "plain"
    denied = await lane.post(chat(), {**LATENCY, "x-slo-max-wait-ms": "300", "x-slo-fallback": "deny"})
    assert denied.status_code == 429
    assert int(denied.headers["retry-after"]) >= 1
    await left(*held)


async def test_a_client_that_leaves_while_it_waits_leaves_the_line(lane: LaneStack) -> None:
    held = await occupied(lane)
    request = asyncio.create_task(lane.post(chat(), PATIENT))
    await queue(lane, 1)
    await left(request)
    await queue(lane, 0)
    await left(*held)


@pytest.mark.parametrize("wait", ["-1", "soon", "1e3", "9" * 5000])
async def test_a_wait_that_is_no_time_is_no_error(lane: LaneStack, wait: str) -> None:
    answer = await lane.post(chat(), {**LATENCY, "x-slo-max-wait-ms": wait})
    assert (answer.status_code, answer.headers["x-slo-lane"]) == (200, "latency")
