"""The two legs of the gateway's tests: a scripted decode daemon (real gRPC) and a scripted vLLM (real HTTP)."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import grpc
import grpc.aio
from aiohttp import web

from handoff import decode_pb2 as pb
from handoff.decode_pb2_grpc import DecoderServicer, add_DecoderServicer_to_server
from leases import Advertiser, LeasesUnavailable, LeaseTable, Node, NodeStatus, SlotView
from tests.kit.gateway import MODEL, PROMPT, card_message

# --- the decode daemon ---

Step = pb.DecodeEvent | Literal["hang", "die"]


def reserved() -> pb.DecodeEvent:
    return pb.DecodeEvent(reserved=pb.Reserved())


def landed(first: int, prompt: Sequence[int] = PROMPT) -> pb.DecodeEvent:
    return pb.DecodeEvent(landed=pb.Landed(prompt_token_ids=prompt, first_token=first))


def tokens(position: int, *ids: int, finish: Any = pb.Tokens.NONE, logprobs: Sequence[pb.TokenLogprobs] = ()) -> pb.DecodeEvent:
    return pb.DecodeEvent(tokens=pb.Tokens(position=position, ids=ids, finish=finish, logprobs=logprobs))


def failed(code: str, message: str = "scripted") -> pb.DecodeEvent:
    return pb.DecodeEvent(failed=pb.Failed(code=code, message=message))


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
    async def registered(self, url: str, *, landing_ms: int = 60_000, node_id: str = "") -> AsyncIterator["ScriptedDaemon"]:
        """Listen, and stay in the lease table."""
        async with LeaseTable(url, ttl_ms=600, landing_ms=landing_ms, timeout_s=5) as table, self.serving():
            self.node = Node(
                node_id=node_id or uuid.uuid4().hex,
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
            return await self.answers.get(request.path, _unknown)(request)
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


async def _unknown(request: web.Request) -> web.StreamResponse:
    return web.Response(status=404)


async def breaks(request: web.Request) -> web.StreamResponse:
    """Drop the connection instead of an answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def hangs(request: web.Request) -> web.StreamResponse:
    """Never answer."""
    await asyncio.Event().wait()
    raise AssertionError


def completion(ids: Sequence[int], finish: str | None = None, text: str = "", logprobs: Any = None) -> bytes:
    """One event of vLLM's /v1/completions with return_token_ids."""
    choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish, "token_ids": list(ids)}
    return _event({"id": "cmpl-1", "choices": [choice]})


def chat_chunk(ids: Sequence[int] | None, finish: str | None = None, text: str = "", logprobs: Any = None) -> bytes:
    """One event of a streamed chat with return_token_ids; the first one, with the role, has none."""
    delta = {"content": text} if ids is not None else {"role": "assistant", "content": text}
    choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish, "token_ids": ids}
    return _event({"id": "chatcmpl-1", "choices": [choice]})


def _event(content: Any) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"
