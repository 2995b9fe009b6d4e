"""What the gateway's units are tested with: a trained tokenizer, a scripted decode daemon (real gRPC), a scripted vLLM (real
HTTP), a lane between them on a real lease table, and Envoy's end of an ext_proc call."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import grpc
import grpc.aio
from aiohttp import web
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from gateway.body import Body
from gateway.cards import Card, Cards, read_card
from gateway.decode_client import DecodeClient
from gateway.lane import LaneParts, LatencyLane, Plain, Prefill, Refusal
from gateway.metrics import GatewayMetrics
from gateway.plan import Plan, make_plan
from gateway.pools import Pools
from gateway.relay import Relay
from gateway.settings import GatewaySettings
from gateway.slo import Wish
from gateway.stages import Stages
from gateway.upstream import Credentials, Upstream
from handoff import decode_pb2 as pb
from handoff.claim import CLAIM_KEY, ClaimKeys
from handoff.decode_pb2_grpc import DecoderServicer, add_DecoderServicer_to_server
from leases import Advertiser, LeasesUnavailable, LeaseTable, Node, NodeStatus, SlotView

MODEL = "tiny"
SECRET = "a secret of the gateway's tests"
CREDENTIALS: Credentials = {b"authorization": b"Bearer client", b"x-request-id": b"r1"}
END_TOKEN = "<end>"

_CORPUS = [
    "The capital of France is Paris. The river is the Seine.",
    "def f(x):\n    return x + 1\n\n\n    # a    b",
    "naïve café façade übergroß Straße",
    "日本語のテキスト、漢字とかな。",
    "emoji 🙂🙃👩‍👩‍👧‍👦🇫🇷 and ½ ∑ → ∞",
    "Привет, мир! Γειά σου Κόσμε",
    "stop here. Stop! STOP? END",
]


@cache
def bpe_tokenizer() -> Tokenizer:
    """A byte-level BPE of 400 tokens, most of them pieces of multi-byte characters, and one special token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=[], show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(END_TOKEN, special=True)])
    return tokenizer


def ids_of(text: str) -> list[int]:
    return list(bpe_tokenizer().encode(text, add_special_tokens=False).ids)


def end_id() -> int:
    token = bpe_tokenizer().token_to_id(END_TOKEN)
    assert token is not None
    return int(token)


def card_message(*, fingerprint: str = "card-1", context_tokens: int = 4096, **defaults: Any) -> pb.ModelCard:
    return pb.ModelCard(
        fingerprint=fingerprint,
        model=MODEL,
        identity="tiny-weights",
        context_tokens=context_tokens,
        tokenizer=bpe_tokenizer().to_str().encode(),
        stop_token_ids=[end_id()],
        eos_token_id=end_id(),
        vocab_size=bpe_tokenizer().get_vocab_size(),
        defaults=pb.SamplingDefaults(**defaults),
    )


def card(**fields: Any) -> Card:
    return read_card(card_message(**fields))


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], **fields}


def body(**fields: Any) -> Body:
    return Body(json.dumps(chat(**fields)).encode())


PROMPT = tuple(ids_of("The capital of France is"))


def prefill_answer(first: int, *, prompt: Sequence[int] = PROMPT, **over: Any) -> dict[str, Any]:
    """vLLM's answer to a prefill leg whose claim the connector took."""
    message = {"role": "assistant", "content": bpe_tokenizer().decode([first]), "refusal": None, "reasoning": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    handed = {CLAIM_KEY: {"first_token": first, "prompt_tail": list(prompt[-32:])}}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": MODEL,
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": {
            "prompt_tokens": len(prompt),
            "total_tokens": len(prompt) + 1,
            "completion_tokens": 1,
            "prompt_tokens_details": {"cached_tokens": 16},
        },
        "kv_transfer_params": handed,
        **over,
    }


# --- the decode daemon ---

Step = pb.DecodeEvent | Literal["hang", "die"]


def reserved() -> pb.DecodeEvent:
    return pb.DecodeEvent(reserved=pb.Reserved())


def landed(first: int, prompt: Sequence[int] = PROMPT) -> pb.DecodeEvent:
    return pb.DecodeEvent(landed=pb.Landed(prompt_token_ids=prompt, first_token=first))


def tokens(position: int, *ids: int, finish: Any = pb.Tokens.NONE) -> pb.DecodeEvent:
    return pb.DecodeEvent(tokens=pb.Tokens(position=position, ids=ids, finish=finish))


def failed(code: str) -> pb.DecodeEvent:
    return pb.DecodeEvent(failed=pb.Failed(code=code, message="scripted"))


@dataclass
class ScriptedDaemon(DecoderServicer):
    """Plays one list of events to every stream; a slot is in use while a stream of it runs."""

    script: Sequence[Step] = ("hang",)
    card: pb.ModelCard = field(default_factory=card_message)
    slots: int = 1
    capacity: int | None = None  # tokens of a slot; None: the card's context
    describe: Callable[[], Awaitable[pb.ModelCard]] | None = None
    requests: list[pb.DecodeRequest] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    endpoint: str = ""
    node: Node | None = None
    _running: dict[int, int] = field(default_factory=dict)  # slot: epoch
    _floors: dict[int, int] = field(default_factory=dict)
    _table: LeaseTable | None = None
    _streams: set[asyncio.Task[Any]] = field(default_factory=set)
    _freeing: set[asyncio.Task[None]] = field(default_factory=set)

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.ModelCard:  # noqa: N802 - gRPC's name
        return await self.describe() if self.describe is not None else self.card

    async def Decode(self, request: pb.DecodeRequest, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        self.requests.append(request)
        stream = asyncio.current_task()
        assert stream is not None
        self._streams.add(stream)
        stream.add_done_callback(self._streams.discard)
        self._running[request.slot] = self._floors[request.slot] = request.epoch
        try:
            for step in self.script:
                if step == "hang":
                    await asyncio.Event().wait()
                elif step == "die":
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "scripted death")
                else:
                    await context.write(step)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            if self._running.get(request.slot) == request.epoch:
                del self._running[request.slot]
            freeing = asyncio.create_task(self._free(request))
            self._freeing.add(freeing)
            freeing.add_done_callback(self._freeing.discard)

    async def _free(self, request: pb.DecodeRequest) -> None:
        if self._table is not None and self.node is not None:
            with suppress(LeasesUnavailable):  # the heartbeat says the same later
                await self._table.release(MODEL, self.node.node_id, request.slot, request.epoch)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["ScriptedDaemon"]:
        """Listen on a port of its own."""
        server = grpc.aio.server()
        add_DecoderServicer_to_server(self, server)
        self.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            yield self
        finally:
            await server.stop(None)
            # What streams do as they end uses the lease table: none may outlive this.
            await asyncio.wait_for(asyncio.gather(*self._streams, return_exceptions=True), 10)
            await asyncio.wait_for(asyncio.gather(*self._freeing), 10)

    @asynccontextmanager
    async def registered(self, url: str, *, landing_ms: int = 60_000) -> AsyncIterator["ScriptedDaemon"]:
        """Listen, and stay in the lease table."""
        async with LeaseTable(url, ttl_ms=600, landing_ms=landing_ms, timeout_s=5) as table, self.serving():
            self.node = Node(
                node_id=uuid.uuid4().hex,
                model=MODEL,
                card=self.card.fingerprint,
                decode_endpoint=self.endpoint,
                control_host="127.0.0.1",
                control_port=7002,
                capacity_tokens=self.capacity or self.card.context_tokens,
                slots=self.slots,
            )
            self._table, listed = table, asyncio.Event()
            async with Advertiser(table, self.node, self._look, lambda _: listed.set()):
                await asyncio.wait_for(listed.wait(), 10)
                yield self

    def _look(self) -> tuple[NodeStatus, list[SlotView]]:
        views = [SlotView(slot, self._floors.get(slot, 0), self._running.get(slot)) for slot in range(self.slots)]
        return NodeStatus(idle=not self._running), views


# --- vLLM ---

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Asked:
    path: str
    headers: Mapping[str, str]  # lower-case names
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class ScriptedVllm:
    """An HTTP server that answers each path with its handler, remembers what it was asked, and notices who leaves."""

    answers: dict[str, Handler] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["ScriptedVllm"]:
        app = web.Application(client_max_size=256 << 20)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    def paths(self) -> list[str]:
        return [asked.path for asked in self.asked]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(
            Asked(request.path, {name.lower(): value for name, value in request.headers.items()}, await request.read())
        )
        try:
            return await self.answers[request.path](request)
        except asyncio.CancelledError:
            self.left.set()
            raise


def answers(content: Any, status: int = 200, content_type: str = "application/json") -> Handler:
    """Answer with bytes as they are, or with JSON."""
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()

    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(body=raw, status=status, content_type=content_type)

    return handler


def streams(*chunks: bytes, then: Literal["end", "hang", "die"] = "end") -> Handler:
    """Answer with an event stream in these very pieces."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
        if then == "hang":
            await asyncio.Event().wait()
        if then == "die":
            assert request.transport is not None
            request.transport.abort()
        return response

    return handler


async def hangs(request: web.Request) -> web.StreamResponse:
    """Never answer."""
    await asyncio.Event().wait()
    raise AssertionError


def completion(ids: Sequence[int], finish: str | None = None, text: str = "") -> bytes:
    """One event of vLLM's /v1/completions with return_token_ids."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "token_ids": list(ids)}
    return b"data: " + json.dumps({"id": "cmpl-1", "choices": [choice]}, ensure_ascii=False).encode() + b"\n\n"


# --- the lane ---


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
        return await self.lane.decide(wish, json.dumps(chat(**{"max_tokens": 9} | fields)).encode(), CREDENTIALS)

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
        parts = LaneParts(config, ClaimKeys(config.signing_keys), table, pools, cards, client, upstream, metrics)
        lane = LatencyLane(parts)
        stack.push_async_callback(lane.settle)
        yield Rig(lane, parts, table, vllm)


@dataclass
class Stage:
    """A lane, its one daemon, and its vLLM."""

    rig: Rig
    daemon: ScriptedDaemon
    vllm: ScriptedVllm


@dataclass
class Relayed:
    """A relay between a scripted daemon that has reserved and a scripted vLLM."""

    relay: Relay
    daemon: ScriptedDaemon
    metrics: GatewayMetrics

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def relayed(
    script: Sequence[Step], vllm: ScriptedVllm, *, raw: bytes | None = None, context_tokens: int = 4096, **fields: Any
) -> AsyncIterator[Relayed]:
    """A request that was prefilled; short times for daemons and vLLM."""
    values: dict[str, Any] = {"secret": SECRET, "upstream_url": vllm.url, "landing_timeout_s": 0.3, "stall_timeout_s": 0.3}
    config = GatewaySettings.load(**values)
    request = Body(raw) if raw is not None else body(**fields)
    model = card(context_tokens=context_tokens)
    plan = make_plan(request, model)
    assert isinstance(plan, Plan), plan
    metrics = GatewayMetrics()
    async with (
        ScriptedDaemon([reserved(), *script]).serving() as daemon,
        LeaseTable("unix:///nowhere.sock", timeout_s=0.2) as table,
        DecodeClient() as client,
        Upstream(vllm.url, token_timeout_s=0.5, tokenize_timeout_s=0.5, generation_timeout_s=5) as upstream,
    ):
        cards = Cards(client, 1.0)
        pools = Pools(table, cards, client, metrics)
        parts = LaneParts(config, ClaimKeys(config.signing_keys), table, pools, cards, client, upstream, metrics)
        stream = await client.reserve(daemon.endpoint, pb.DecodeRequest(), 5)
        prefill = Prefill(b"", request, plan, model, stream, Stages(), CREDENTIALS)
        async with aclosing(Relay(parts, prefill)) as relay:
            yield Relayed(relay, daemon, metrics)


# --- Envoy's end of a call ---


def header_map(headers: Sequence[tuple[str, bytes]]) -> HeaderMap:
    return HeaderMap(headers=[HeaderValue(key=key, raw_value=value) for key, value in headers])


LATENCY = (("x-slo-class", b"latency"),)


def request_headers(
    *extra: tuple[str, bytes], method: str = "POST", path: str = "/v1/chat/completions", end: bool = False
) -> ext.ProcessingRequest:
    headers = [(":method", method.encode()), (":path", path.encode()), *(extra or LATENCY)]
    return ext.ProcessingRequest(request_headers=ext.HttpHeaders(headers=header_map(headers), end_of_stream=end))


def request_body(content: bytes) -> ext.ProcessingRequest:
    return ext.ProcessingRequest(request_body=ext.HttpBody(body=content, end_of_stream=True))


def response_headers(status: int = 200, *, end: bool = False) -> ext.ProcessingRequest:
    headers = header_map([(":status", str(status).encode())])
    return ext.ProcessingRequest(response_headers=ext.HttpHeaders(headers=headers, end_of_stream=end))


def response_body(content: bytes, *, end: bool = True) -> ext.ProcessingRequest:
    return ext.ProcessingRequest(response_body=ext.HttpBody(body=content, end_of_stream=end))


def response_trailers() -> ext.ProcessingRequest:
    return ext.ProcessingRequest(response_trailers=ext.HttpTrailers())


class ScriptedWire:
    """Sends these messages, then the end of the call, or nothing more; keeps what is written."""

    def __init__(self, *messages: ext.ProcessingRequest, then: Literal["eof", "hang"] = "eof") -> None:
        self._messages = list(messages)
        self._then = then
        self.written: list[ext.ProcessingResponse] = []
        self.drained = asyncio.Event()  # everything was read, and more is waited for
        self.full_after: int | None = None  # writes block after so many
        self.blocked = asyncio.Event()

    async def read(self) -> Any:
        await asyncio.sleep(0)
        if self._messages:
            return self._messages.pop(0)
        self.drained.set()
        if self._then == "hang":
            await asyncio.Event().wait()
        return grpc.aio.EOF

    async def write(self, message: ext.ProcessingResponse) -> None:
        if self.full_after is not None and len(self.written) >= self.full_after:
            self.blocked.set()
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        self.written.append(message)
