"""The lane against plain vLLM, end to end through Envoy: the same prompts in turns, on one running stack (vLLM compiled)."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from statistics import median
from time import perf_counter

from openai import AsyncOpenAI

from benchmarks.engine import ANSWER_TOKENS, Rig, prompts
from benchmarks.engine import measure as alone
from benchmarks.report import Measure
from cli.settings import LocalSettings
from cli.stack import Stack

_KINDS = ("chat", "copy")
_LATENCY = {"x-slo-class": "latency"}


async def measure(settings: LocalSettings, *, rounds: int = 5) -> list[Measure]:
    """Take every measure on a stack of its own, those of the engine alone first, beside an idle and a busy vLLM.

    Raises ProcessError when the stack cannot start, EngineError for a model that the engine cannot run, RuntimeError when an
    answer did not come down the lane that was asked.
    """
    async with Stack(settings) as stack, AsyncOpenAI(base_url=stack.base_url, api_key="-", max_retries=0) as client:
        ask = partial(_token_seconds, client, settings.served_model_name)
        for lane in (False, True):  # vLLM's first requests pay for compilation; nobody's figures shall
            await ask("Say hello.", lane=lane)
        measures = await asyncio.to_thread(alone, settings.model, rounds=rounds)
        measures.append(await _beside_a_busy_vllm(ask, settings, rounds))
        for kind in _KINDS:
            taken: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(rounds):
                for prompt in prompts()[kind]:
                    for lane, times in taken.items():
                        times.append(await ask(prompt, lane=lane))
            measures += _compared(kind, taken[False], taken[True])
    values = {measure.name: measure.value for measure in measures}
    ratio = values["plain_chat_token_ms"] / values["step_at_128_ms"]
    return [*measures, Measure("vllm_over_step", ratio, "x", "vLLM's time per token over a step of the engine alone")]


async def _beside_a_busy_vllm(ask: Callable[..., Awaitable[float]], settings: LocalSettings, rounds: int) -> Measure:
    rig = await asyncio.to_thread(Rig.load, settings.model)
    answers = [asyncio.ensure_future(ask(prompt, lane=False)) for prompt in prompts()["chat"]]
    try:
        taken = [await asyncio.to_thread(rig.step_seconds, rig.contexts()[0]) for _ in range(rounds)]
        running = sum(not answer.done() for answer in answers)
        how = f"while vLLM decodes {running} answers on the same cores"
        return Measure("step_beside_busy_vllm_ms", median(taken) * 1e3, "ms", how)
    finally:
        for answer in answers:
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)


def _compared(kind: str, plain: Sequence[float], lane: Sequence[float]) -> Iterator[Measure]:
    yield Measure(f"plain_{kind}_token_ms", median(plain) * 1e3, "ms", "vLLM's time per output token after the second")
    yield Measure(f"lane_{kind}_token_ms", median(lane) * 1e3, "ms", "the lane's")
    ratios = [slow / fast for slow, fast in zip(plain, lane, strict=True)]
    yield Measure(f"lane_over_plain_{kind}", median(ratios), "x", f"{len(plain)} pairs, through Envoy, {ANSWER_TOKENS} tokens")


async def _token_seconds(client: AsyncOpenAI, model: str, prompt: str, *, lane: bool) -> float:
    """Return the time per token of an answer after its second one."""
    raw = await client.chat.completions.with_raw_response.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=ANSWER_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "return_token_ids": True},
        extra_headers=_LATENCY if lane else {},
    )
    if (raw.headers.get("x-slo-lane") == "latency") != lane:
        raise RuntimeError(f"the answer came down another lane than was asked: {raw.headers.get('x-slo-reason')}")
    second, last, tokens, at_second = 0.0, 0.0, 0, 0
    async for chunk in raw.parse():
        for choice in chunk.choices:
            tokens += len(getattr(choice, "token_ids", None) or ())
            last = perf_counter()
            if tokens >= 2 and not second:
                second, at_second = last, tokens
    if tokens == at_second:
        raise RuntimeError(f"{tokens} tokens came at once: there is no time between them")
    return (last - second) / (tokens - at_second)
