"""A lane between scripted legs, on a real lease table."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from gateway.cards import Cards
from gateway.decode_client import DecodeClient
from gateway.endpoints import Endpoint
from gateway.lane import LaneParts, LatencyLane, Plain, Prefill, Refusal, make_parts
from gateway.metrics import GatewayMetrics
from gateway.pools import Pools
from gateway.settings import GatewaySettings
from gateway.slo import Wish
from gateway.upstream import Upstream
from leases import LeaseTable
from tests.kit.gateway import CREDENTIALS, MODEL, SECRET, chat, prompt_request
from tests.kit.legs import ScriptedDaemon, ScriptedVllm


@dataclass
class Rig:
    """A lane and what it stands on."""

    lane: LatencyLane
    parts: LaneParts
    table: LeaseTable
    vllm: ScriptedVllm

    def value(self, name: str, **labels: str) -> float:
        return self.parts.metrics.registry.get_sample_value(name, labels) or 0.0

    def requests(self) -> dict[tuple[str, str, str], int]:
        """How often each (lane, outcome, reason) was counted."""
        return {
            (sample.labels["lane"], sample.labels["outcome"], sample.labels["reason"]): int(sample.value)
            for metric in self.parts.metrics.requests.collect()
            for sample in metric.samples
            if sample.name.endswith("_total")
        }

    async def decide(self, wish: Wish, **fields: Any) -> Plain | Refusal | Prefill:
        """The lane's decision on a short chat completion."""
        content = json.dumps(chat(**{"max_tokens": 9} | fields)).encode()
        return await self.lane.decide(wish, Endpoint.CHAT, content, CREDENTIALS)

    async def decide_completion(self, wish: Wish, **fields: Any) -> Plain | Refusal | Prefill:
        """The lane's decision on a short completion."""
        content = json.dumps(prompt_request(**{"max_tokens": 9} | fields)).encode()
        return await self.lane.decide(wish, Endpoint.COMPLETIONS, content, CREDENTIALS)

    async def free_slots(self) -> int:
        view = (await self.table.pools()).get(MODEL)
        return 0 if view is None else view.free_slots

    async def queue(self) -> int:
        """How many requests wait for a slot."""
        report = (await self.table.inspect()).get(MODEL)
        return 0 if report is None else len(report.queue)


@asynccontextmanager
async def rig(redis_url: str, vllm: ScriptedVllm, **settings: Any) -> AsyncIterator[Rig]:
    """A lane on these parts; `vllm` must be serving."""
    values = {"secret": SECRET, "redis_url": redis_url, "upstream_url": vllm.url, **settings}
    config = GatewaySettings.load(**values)
    metrics = GatewayMetrics()
    async with AsyncExitStack() as stack:
        table = await stack.enter_async_context(LeaseTable(redis_url, timeout_s=config.leases_timeout_s))
        client = await stack.enter_async_context(DecodeClient())
        upstream = await stack.enter_async_context(
            Upstream(
                config.upstream_url,
                token_timeout_s=config.resume_timeout_s,
                tokenize_timeout_s=config.tokenize_timeout_s,
                generation_timeout_s=config.generation_timeout_s,
            )
        )
        cards = Cards(client, 1.0)
        pools = Pools(table, cards, client, metrics)
        stack.push_async_callback(pools.aclose)
        await pools.start()
        parts = make_parts(config, table=table, pools=pools, cards=cards, client=client, upstream=upstream, metrics=metrics)
        lane = LatencyLane(parts)
        stack.push_async_callback(lane.settle)
        yield Rig(lane, parts, table, vllm)


@dataclass
class Stage:
    """A lane, its one daemon, and its vLLM."""

    rig: Rig
    daemon: ScriptedDaemon
    vllm: ScriptedVllm
