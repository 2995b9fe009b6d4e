"""What the legs do and count: one token in the prefill leg, cached prompt tokens as vLLM counts them, seeds that repeat."""

import asyncio
from typing import Any

import pytest

from tests.fidelity.case import STORY, Case, Path, chat, text
from tests.fidelity.stacks import Running

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

BLOCK = 128  # tokens of a block of vLLM's cache
BYTES_PER_TOKEN = 30 * 3 * 2 * 64 * 4  # layers, heads, K and V, dimensions, float32
LONG = " ".join(["word"] * 300)


@pytest.mark.parametrize(
    "limit",
    [{"max_tokens": 12}, {"max_completion_tokens": 12, "max_tokens": None}, {"max_tokens": 3, "max_completion_tokens": 12}],
)
async def test_the_prefill_leg_generates_one_token_whatever_the_limit(running: Running, limit: dict[str, Any]) -> None:
    before = await running.lane.metric("vllm", "vllm:generation_tokens_total")
    answer = await running.both.lane(chat("twelve", ignore_eos=True, **limit))
    assert answer.value["usage"]["completion_tokens"] == 12
    assert await running.lane.metric("vllm", "vllm:generation_tokens_total") == before + 1


async def test_the_prompt_is_computed_once_by_vllm_and_not_by_the_daemon(running: Running) -> None:
    """A5: an equal answer does not tell whether the handoff was of use."""

    async def counts() -> tuple[float, ...]:
        vllm = await running.lane.metric("vllm", "vllm:prompt_tokens_total")
        daemon = (
            "anchorleg_decode_step_seconds_count",
            "anchorleg_decode_tokens_total",
            "anchorleg_handoff_received_bytes_total",
        )
        return (vllm, *[await running.lane.metric("decode", name) for name in daemon])

    before = await counts()
    answer = await running.both.lane(chat("long", question=LONG, cache_salt="computed once", ignore_eos=True))
    prompt, steps, tokens, landed = (now - then for now, then in zip(await counts(), before, strict=True))
    usage = answer.value["usage"]
    assert (answer.lane, prompt) == ("latency", usage["prompt_tokens"])
    # Each step adds the tokens of the answer that it gives, and nothing of the prompt.
    assert steps <= tokens == usage["completion_tokens"] - 1
    assert landed >= usage["prompt_tokens"] * BYTES_PER_TOKEN


@pytest.mark.parametrize("path", Path)
@pytest.mark.parametrize("stream", [False, True])
async def test_cached_tokens_are_those_that_vllm_found_in_its_cache(running: Running, path: Path, stream: bool) -> None:
    """Never seen before, and once again: the figures are the prompt's, not the handoff's."""
    usage = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    fields = {"max_tokens": 3, "cache_salt": f"cached-{path.name}-{stream}", **usage}
    case = chat("long", question=LONG, **fields) if path is Path.CHAT else text("long", prompt=LONG, **fields)
    counted = []
    for ask in (running.both.plain, running.both.lane):
        for _ in range(2):
            details = (await ask(case)).value["usage"]["prompt_tokens_details"]
            counted.append(details["cached_tokens"])
    assert counted == [0, 2 * BLOCK, 0, 2 * BLOCK]


async def test_a_seed_gives_the_same_answer_again_alone_and_beside_others(running: Running) -> None:
    seeded = text("seeded", prompt=STORY, temperature=0.8, seed=42, max_tokens=10)
    other = text("unseeded", prompt=STORY, temperature=0.8, max_tokens=10)

    async def said(case: Case) -> str:
        answer = await running.both.lane(case)
        assert answer.lane == "latency"
        return str(answer.value["choices"][0]["text"])

    alone = [await said(seeded) for _ in range(2)]
    beside = await asyncio.gather(said(seeded), said(other), said(seeded))
    assert {*alone, beside[0], beside[2]} == {alone[0]}
