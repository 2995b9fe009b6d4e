"""A handoff belongs to one request: neither salts, nor names that clients choose, nor load make it another's."""

import asyncio
from typing import Any

import pytest

from tests.kit.e2e import PROMPTS, Lane, read
from tests.kit.lane import LATENCY

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

LONG = "The following numbers are listed once more: " + " ".join(str(number) for number in range(90))


async def test_the_same_prompt_under_two_salts_is_computed_twice_and_answered_alike(lane: Lane) -> None:
    plain = await lane.ask(LONG, latency=False, max_tokens=8)

    async def computed(salt: str) -> float:
        before = await lane.metric("vllm", "vllm:prefix_cache_hits_total")
        assert await lane.ask(LONG, latency=True, max_tokens=8, cache_salt=salt) == plain
        return await lane.metric("vllm", "vllm:prefix_cache_hits_total") - before

    assert await computed("one") == 0
    assert await computed("another") == 0
    assert await computed("one") > 0


async def test_requests_to_which_clients_give_the_same_id_do_not_meet(lane: Lane) -> None:
    prompts = PROMPTS[:3]
    plain = await asyncio.gather(*(lane.ask(prompt, latency=False, max_tokens=8) for prompt in prompts))
    headers = {**LATENCY, "x-request-id": "abc", "x-slo-max-wait-ms": "10000"}

    async def named(prompt: str) -> Any:
        answer = await lane.client.post("/chat/completions", json=lane.request(prompt, max_tokens=8), headers=headers)
        assert answer.headers["x-slo-lane"] == "latency", answer.headers["x-slo-reason"]
        return read(answer.json())

    assert await asyncio.gather(*(named(prompt) for prompt in prompts)) == plain


@pytest.mark.parametrize("probes", [8, pytest.param(60, marks=pytest.mark.endurance)])
async def test_a_probes_answer_never_changes_under_load(lane: Lane, probes: int) -> None:
    probe = lane.request("San Francisco is a", max_tokens=10)
    expected = await lane.ask("San Francisco is a", latency=False, max_tokens=10)
    over = asyncio.Event()

    async def load(prompt: str, latency: bool) -> None:
        while not over.is_set():
            await lane.post(lane.request(prompt, max_tokens=24), latency=latency, fallback=True)

    loads = [
        asyncio.create_task(load(prompt, latency)) for prompt, latency in ((LONG, True), (PROMPTS[5], True), (LONG, False))
    ]
    try:
        for _ in range(probes):
            answer = await lane.post(probe, latency=True, fallback=True)
            assert read(answer.json()) == expected, answer.headers["x-slo-lane"]
    finally:
        over.set()
        await asyncio.gather(*loads)
