"""Questions to a real stack, and a look at what it holds."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from cli.settings import LocalSettings
from cli.stack import Stack
from tests.kit.lane import LATENCY, until

PROMPTS = (
    "What is the capital of France?",
    "Name three colours of the rainbow.",
    "Write one sentence about the sea.",
    "Count from one to ten.",
    "What is two plus two?",
    "Translate 'good morning' into French.",
    "Who wrote Romeo and Juliet?",
    "Give me a short recipe for pancakes.",
    "What do bees make?",
    "Explain gravity to a child.",
    "List the days of the week.",
    "Write a Python function that adds two numbers.",
    "What is the opposite of hot?",
    "Tell me a fact about the moon.",
    "How many legs does a spider have?",
    "Name a large animal that lives in Africa.",
    "Say hello in Spanish and in German.",
)


@dataclass(frozen=True, slots=True)
class Said:
    """One answer, reduced to what both lanes must agree on."""

    text: str
    finish_reason: str | None
    stop_reason: object
    usage: tuple[int, int]  # prompt, completion


@dataclass(frozen=True, slots=True)
class Lane:
    """A running stack and a client of it."""

    stack: Stack
    settings: LocalSettings
    client: httpx.AsyncClient

    async def post(self, body: dict[str, Any], *, latency: bool, fallback: bool = False) -> httpx.Response:
        """Send a chat completion; one that must take the lane fails if it does not."""
        headers = LATENCY if latency else {}
        response = await self.client.post("/chat/completions", json=body, headers=headers)
        if latency and not fallback:
            assert response.headers["x-slo-lane"] == "latency", response.headers["x-slo-reason"]
        return response

    async def ask(self, content: str, *, latency: bool, **fields: Any) -> Said:
        """Ask greedily, in one piece."""
        response = await self.post(self.request(content, **fields), latency=latency)
        assert response.status_code == 200, response.text
        return read(response.json())

    async def stream(self, content: str, *, latency: bool, **fields: Any) -> Said:
        """Ask greedily, streaming."""
        body = self.request(content, stream=True, stream_options={"include_usage": True}, **fields)
        response = await self.post(body, latency=latency)
        assert response.status_code == 200, response.text
        return read_stream(response.text)

    def request(self, content: str, **fields: Any) -> dict[str, Any]:
        """Return a greedy request."""
        messages = [{"role": "user", "content": content}]
        return {"model": self.settings.served_model_name, "messages": messages, "temperature": 0, "max_tokens": 32, **fields}

    @property
    def daemons(self) -> list[str]:
        """The names of the decode daemons' processes."""
        return [service.name for service in self.stack.services if service.name.partition("-")[0] == "decode"]

    async def metric(self, service: str, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples with these labels at one process; "decode" stands for all daemons.

        A daemon that a test has killed has none.
        """
        return sum([await self._at(one, name, labels) for one in (self.daemons if service == "decode" else [service])])

    async def _at(self, service: str, name: str, labels: dict[str, str]) -> float:
        url = next(s.metrics[0] for s in self.stack.services if s.name == service)
        try:
            text = (await self.client.get(url)).text
        except httpx.ConnectError:
            return 0.0
        samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

    async def state(self, state: str) -> float:
        """Return how many of the daemons' slots are in a state."""
        return await self.metric("decode", "anchorleg_slots", state=state)

    async def slots(self) -> float:
        """Return how many slots the daemons have."""
        return await self.metric("decode", "anchorleg_slots")

    async def decoding_daemon(self) -> str:
        """Return the name of the one daemon that decodes now."""
        [name] = [one for one in self.daemons if await self.metric(one, "anchorleg_slots", state="decoding")]
        return name

    async def pool_free(self) -> float:
        """Return how many slots the lease table has free, as the gateway sees it."""
        return await self.metric("extproc", "anchorleg_pool_slots", state="free")

    async def wait_for_slots(self) -> None:
        """Wait until the gateway knows every daemon."""

        async def known() -> bool:
            return await self.pool_free() == await self.slots() > 0

        await until(known, "the gateway knows the daemons", 30)


@asynccontextmanager
async def decoding(lane: Lane, prompt: str, **fields: Any) -> AsyncIterator["asyncio.Task[str]"]:
    """A stream of the lane, once its daemon decodes; the task returns all of it."""
    body = lane.request(prompt, stream=True, stream_options={"include_usage": True}, **fields)
    received: list[str] = []

    async def read() -> str:
        async with lane.client.stream("POST", "/chat/completions", json=body, headers=LATENCY) as response:
            assert response.headers["x-slo-lane"] == "latency"
            async for text in response.aiter_text():
                received.append(text)
        return "".join(received)

    reading = asyncio.create_task(read())
    try:
        await until(lambda: "".join(received).count('"content":"') > 8, "the daemon decodes", 60)
        yield reading
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def quiet(lane: Lane, seconds: float = 15) -> None:
    """Wait until nothing is held anywhere: slots, leases, vLLM's requests and blocks."""

    async def holds_nothing() -> bool:
        states = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        held = [await lane.metric("vllm", f"vllm:{state}") for state in states]
        return not any(held) and await lane.state("free") == await lane.slots() == await lane.pool_free()

    await until(holds_nothing, "every slot is free and vLLM holds no block", seconds)


def read(answer: dict[str, Any]) -> Said:
    """Reduce a chat completion."""
    [choice] = answer["choices"]
    usage = answer["usage"]
    return Said(
        choice["message"]["content"],
        choice["finish_reason"],
        choice["stop_reason"],
        (usage["prompt_tokens"], usage["completion_tokens"]),
    )


def read_stream(text: str) -> Said:
    """Reduce a stream of chat completion chunks, which must be a whole one."""
    lines = [line.removeprefix("data: ") for line in text.strip().split("\n\n")]
    assert lines[-1] == "[DONE]", text[-300:]
    chunks = [json.loads(line) for line in lines[:-1]]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    content = "".join(choice["delta"].get("content") or "" for choice in choices)
    endings = [choice for choice in choices if choice["finish_reason"] is not None]
    assert len(endings) == 1
    usage = chunks[-1]["usage"]
    return Said(
        content,
        endings[0]["finish_reason"],
        endings[0].get("stop_reason"),
        (usage["prompt_tokens"], usage["completion_tokens"]),
    )
