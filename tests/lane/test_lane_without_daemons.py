"""The lane when its daemons are not there, or no longer: who answers then, and that they need only come back."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from benchmarks.fake_daemon import DaemonScript
from benchmarks.fakes import END
from handoff.claim import CLAIM_KEY
from tests.kit.lane import LATENCY, LaneStack, chat, daemon_process, lane_stack, registered, until

DENY = {**LATENCY, "x-slo-fallback": "deny"}


@pytest_asyncio.fixture
async def empty_lane(tmp_path: Path) -> AsyncIterator[LaneStack]:
    """Everything but a daemon."""
    async with lane_stack(tmp_path, with_daemon=False) as stack:
        yield stack


async def left_to_vllm(lane: LaneStack, *reasons: str) -> None:
    """Ask twice: vLLM answers where it may, once and as it was asked; who forbids it is told that the lane is away."""
    lane.vllm.requests.clear()
    answer = await lane.post(chat())
    assert (answer.headers["x-slo-lane"], answer.headers["x-slo-reason"] in reasons) == ("throughput", True), answer.headers
    assert answer.json()["choices"][0]["message"]["content"] == "plain"
    assert lane.vllm.bodies() == [chat()]
    ((_, headers, _),) = lane.vllm.requests
    assert not [name for name in headers if "anchorleg" in name.lower()]
    denied = await lane.post(chat(), DENY)
    assert denied.status_code == 503
    assert denied.json()["error"]["code"] in reasons
    assert int(denied.headers["retry-after"]) >= 1


async def test_a_lane_without_daemons_is_no_bad_gateway_and_recovers_by_itself(empty_lane: LaneStack) -> None:
    """A11: 503 with an error of OpenAI's form, never 502, where no daemon has come up. A12: plain vLLM, until one has."""
    lane = empty_lane
    await left_to_vllm(lane, "no_daemon")
    async with daemon_process(lane, DaemonScript()) as daemon:
        await until(lambda: served(lane), "the lane serves")
        daemon.kill()
        daemon.wait(10)
        # First the table has it still, and its port refuses connections; then it has no daemon.
        await left_to_vllm(lane, "daemon_unavailable", "no_daemon")
        await until(lambda: away(lane), "the dead daemon has left the table")
        await left_to_vllm(lane, "no_daemon")
    async with lane.daemon.running(lane.redis.url):
        await until(lambda: served(lane), "the lane serves again")
        await lane.all_free()


async def test_an_error_of_vllm_in_place_of_a_daemon_is_the_clients_and_not_tried_again(empty_lane: LaneStack) -> None:
    """A12: one attempt."""
    empty_lane.vllm.script.status = 503
    answer = await empty_lane.post(chat())
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "scripted 503")
    assert len(empty_lane.vllm.requests) == 1


@pytest.mark.parametrize("penalty", [0, 1.5], ids=["vLLM can go on", "vLLM cannot go on"])
async def test_a_handoff_whose_daemon_dies_after_it_has_landed_is_never_used_again(
    empty_lane: LaneStack, penalty: float
) -> None:
    """A15: the daemon has accepted, and said that the KV cache landed; its connection dies before the first token."""
    lane = empty_lane
    lane.vllm.script.resumed = [*b"ello", END]
    async with daemon_process(lane, DaemonScript(hang_after=0)) as daemon:
        await until(lambda: served(lane), "the lane serves")
        lane.vllm.requests.clear()
        requests = [asyncio.create_task(lane.post(chat(stream=stream, presence_penalty=penalty))) for stream in (True, False)]
        await until(lambda: landed(lane) == len(requests), "the daemon has said that both KV caches landed")
        daemon.kill()
        stream, whole = await asyncio.gather(*requests)
    assert (stream.status_code, whole.status_code) == (200, 200)
    assert stream.text.rstrip().endswith("[DONE]")
    assert whole.json()["choices"][0]["message"]["content"] == ("plain" if penalty else "Hello")
    asked = [body for path in ("/v1/chat/completions", "/v1/completions") for body in lane.vllm.bodies(path)]
    handed_over = [CLAIM_KEY in (body.get("kv_transfer_params") or {}) for body in asked]
    assert sorted(handed_over) == [False, False, True, True]


async def served(lane: LaneStack) -> bool:
    return (await lane.post(chat(max_tokens=1))).headers["x-slo-reason"] == "ok"


async def away(lane: LaneStack) -> bool:
    return not await registered(lane.table)


def landed(lane: LaneStack) -> float:
    return lane.counted("anchorleg_stage_seconds_count", stage="handoff")
