"""Questions to a real stack, and a look at what it holds."""

import json
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
    "Complete: roses are red, violets are",
    "What is H2O?",
    "Name a large animal that lives in Africa.",
    "Why is the sky blue?",
    "Write a haiku about rain.",
    "What is the boiling point of water in Celsius?",
    "Give an example of a prime number above 100.",
    "Who painted the Mona Lisa?",
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

    async def metric(self, service: str, name: str) -> float:
        """Return the sum of a metric's samples at one process."""
        url = self._metrics_url(service)
        text = (await self.client.get(url)).text
        return sum(
            sample.value for family in text_string_to_metric_families(text) for sample in family.samples if sample.name == name
        )

    async def state(self, state: str) -> float:
        """Return how many of the daemon's slots are in a state."""
        url = self._metrics_url("decode")
        for family in text_string_to_metric_families((await self.client.get(url)).text):
            for sample in family.samples:
                if sample.name == "anchorleg_slots" and sample.labels["state"] == state:
                    return sample.value
        raise AssertionError("the daemon has no anchorleg_slots")

    async def pool_free(self) -> float:
        """Return how many slots the lease table has free, as the gateway sees it."""
        url = self._metrics_url("extproc")
        for family in text_string_to_metric_families((await self.client.get(url)).text):
            for sample in family.samples:
                if sample.name == "anchorleg_pool_slots" and sample.labels["state"] == "free":
                    return sample.value
        return 0.0

    def _metrics_url(self, service: str) -> str:
        return next(s.metrics[0] for s in self.stack.services if s.name == service)

    async def wait_for_slots(self) -> None:
        """Wait until the gateway knows the daemon."""

        async def known() -> bool:
            return await self.pool_free() >= 1

        await until(known, "the gateway knows the daemon", 30)


async def quiet(lane: Lane) -> None:
    """Wait until nothing is held anywhere: slots, leases, vLLM's requests and blocks."""

    async def holds_nothing() -> bool:
        busy = await lane.metric("vllm", "vllm:num_requests_running") + await lane.metric("vllm", "vllm:num_requests_waiting")
        blocks = await lane.metric("vllm", "vllm:kv_cache_usage_perc")
        return busy == 0 and blocks == 0 and await lane.state("free") == 2 and await lane.pool_free() >= 2

    await until(holds_nothing, "every slot is free and vLLM holds no block", 15)


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
