"""One answer's relay between scripted legs, and what a client reads of it."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from gateway.body import Body
from gateway.cards import Cards
from gateway.decode_client import DecodeClient
from gateway.endpoints import Endpoint
from gateway.lane import LaneParts, Prefill, make_parts
from gateway.metrics import GatewayMetrics
from gateway.plan import Plan, make_plan
from gateway.pools import Pools
from gateway.relay import Relay
from gateway.rendering import Rendered
from gateway.settings import GatewaySettings
from gateway.slo import SloClass, Wish
from gateway.sse import EventReader
from gateway.stages import Stages
from gateway.upstream import Upstream
from handoff import decode_pb2 as pb
from leases import LeaseTable
from tests.kit.gateway import (
    CREDENTIALS,
    SECRET,
    card,
    chat,
    end_id,
    ids_of,
    prefill_answer,
    prefill_completion,
    prompt_request,
)
from tests.kit.legs import ScriptedDaemon, ScriptedVllm, Step, landed, reserved, tokens

FAILED_NODE = "the node of the daemon that fails"
CHAT, COMPLETIONS, TOKENIZE = str(Endpoint.CHAT), str(Endpoint.COMPLETIONS), "/tokenize"
TEXT = " Paris. The river is the Seine."
FIRST, *REST = ids_of(TEXT)
END = end_id()


@dataclass
class Relayed:
    """A relay between a scripted daemon that has reserved and a scripted vLLM."""

    relay: Relay
    daemon: ScriptedDaemon
    metrics: GatewayMetrics
    parts: LaneParts
    prefill: Prefill

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def relayed(
    script: Sequence[Step],
    vllm: ScriptedVllm,
    *,
    raw: bytes | None = None,
    endpoint: Endpoint = Endpoint.CHAT,
    redis_url: str = "unix:///nowhere.sock",
    settings: Mapping[str, Any] | None = None,
    rendered: Rendered | None = None,
    **fields: Any,
) -> AsyncIterator[Relayed]:
    """A request that was prefilled; short times for daemons and vLLM. Its daemon is not in the lease table.

    `rendered`: vLLM's parsers make the answer. Fields of the request, and `context_tokens` and `defaults` of the model.
    """
    values: dict[str, Any] = {"secret": SECRET, "upstream_url": vllm.url, "landing_timeout_s": 0.3, "stall_timeout_s": 0.3}
    config = GatewaySettings.load(**values | {"reserve_timeout_s": 0.5} | dict(settings or {}))
    model = card(context_tokens=fields.pop("context_tokens", 4096), **fields.pop("defaults", {}))
    request = Body(raw or json.dumps((chat if endpoint is Endpoint.CHAT else prompt_request)(**fields)).encode())
    plan = make_plan(endpoint, request, model, tools=rendered is not None)
    assert isinstance(plan, Plan), plan
    metrics = GatewayMetrics()
    async with AsyncExitStack() as stack:
        daemon = await stack.enter_async_context(ScriptedDaemon([reserved(), *script]).serving())
        table = await stack.enter_async_context(LeaseTable(redis_url, timeout_s=0.2 if "nowhere" in redis_url else 5))
        client = await stack.enter_async_context(DecodeClient())
        upstream = await stack.enter_async_context(
            Upstream(vllm.url, token_timeout_s=0.5, tokenize_timeout_s=0.5, generation_timeout_s=5)
        )
        cards = Cards(client, 1.0)
        pools = Pools(table, cards, client, metrics)
        parts = make_parts(config, table=table, pools=pools, cards=cards, client=client, upstream=upstream, metrics=metrics)
        stack.push_async_callback(parts.slots.settle)
        stream = await client.reserve(daemon.endpoint, pb.DecodeRequest(), 5)
        wish = Wish(SloClass.LATENCY, fallback=True)
        prefill = Prefill(
            body=b"",
            original=request,
            plan=plan,
            card=model,
            stream=stream,
            node_id=FAILED_NODE,
            wish=wish,
            stages=Stages(),
            credentials=CREDENTIALS,
            rendered=rendered,
        )
        relay = await stack.enter_async_context(aclosing(Relay(parts, prefill)))
        yield Relayed(relay, daemon, metrics, parts, prefill)


def answer_of_vllm(first: int = FIRST, finish: str = "length", *, endpoint: Endpoint = Endpoint.CHAT, **over: Any) -> bytes:
    make = prefill_answer if endpoint is Endpoint.CHAT else prefill_completion
    answer = make(first, **over)
    answer["choices"][0]["finish_reason"] = finish
    return json.dumps(answer).encode()


def decoded(ids: Sequence[int], start: int = 1, finish: Any = pb.Tokens.STOP) -> list[Step]:
    """One message for each id; the last one says how the answer ends."""
    return [tokens(start + n, token, finish=finish if n == len(ids) - 1 else pb.Tokens.NONE) for n, token in enumerate(ids)]


SO_FAR = [FIRST, *REST[:3]]
"""Tokens sent before a daemon fails in mid-stream."""

MID_STREAM = [landed(FIRST), *decoded(REST[:3], finish=pb.Tokens.NONE)]


async def body_of(served: Relayed, answer: bytes) -> bytes:
    got = await served.relay.answer(answer)
    return b"".join([chunk async for chunk in got.chunks])


def events(body: bytes) -> list[Any]:
    return [event if event == b"[DONE]" else json.loads(event) for event in EventReader().feed(body)]


def said(body: bytes) -> tuple[str, str | None]:
    """Text and finish reason, of a stream or of one object, on either endpoint."""
    if not body.startswith(b"data:"):
        choices = json.loads(body)["choices"]
    else:
        choices = [event["choices"][0] for event in events(body) if event != b"[DONE]" and event.get("choices")]
    return "".join(map(_text, choices)), choices[-1]["finish_reason"]


def _text(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    return str(choice["delta" if "delta" in choice else "message"].get("content") or "")


def lost(body: bytes) -> bool:
    """Whether a stream ends with an error that no client takes for a whole answer."""
    *shown, last = events(body)
    return b"[DONE]" not in shown and bool(last["error"]["code"] == "decode_lost")


async def freed(served: Relayed) -> None:
    await asyncio.wait_for(served.daemon.cancelled.wait(), 1)
