"""A scriptable vLLM and a scriptable decode daemon, for what must be measured or broken without a model.

They speak the real protocols: OpenAI over HTTP and the decode stream over gRPC, and the daemon keeps itself in the real lease
table. A byte is a token here: id 0 to 255 is that byte, id 256 ends an answer, and the ids above are stamps.
"""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from aiohttp import web
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from handoff import decode_pb2 as pb
from handoff.claim import CLAIM_KEY
from handoff.decode_pb2_grpc import DecoderServicer, add_DecoderServicer_to_server
from leases import Advertiser, LeasesUnavailable, LeaseTable, Node, NodeStatus, SlotView

MODEL = "fake"
END = 256
PROMPT_IDS = tuple(b"the prompt")
SERVING: dict[str, Any] = {
    "defaults": {},
    "longest_answer": None,
    "logprobs_mode": "raw_logprobs",
    "grammar_backend": "auto",
    "compact_json": False,
    "reasoning_parser": "",
    "grammar_in_reasoning": False,
    "watermark": False,
}
"""What the connector tells of a vLLM that was told nothing in particular (connector/serving.py)."""

STAMP_TICKS = 1 << 16  # a stamp is the time of sending in ticks, modulo 0.66 s: short enough to be one token
STAMP_TICK_NS = 10_000
_MAX_BODY = 256 << 20


def card_name(context_tokens: int) -> str:
    """Return the fingerprint of a fake daemon's card."""
    return f"fake-{context_tokens}"


def stamp_text(ticks: int) -> str:
    """Return a stamp as it stands in a text."""
    return f"@{ticks % STAMP_TICKS:04x}"


def now_ticks() -> int:
    """Return the monotonic time in ticks, modulo their number."""
    return time.monotonic_ns() // STAMP_TICK_NS % STAMP_TICKS


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer whose ids are bytes, an end, and the stamps."""
    # GPT-2's printable stand-ins for bytes, in the order of the bytes they stand for.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_ins = {byte: chr(byte) for byte in printable}
    stand_ins |= {byte: chr(256 + n) for n, byte in enumerate(b for b in range(256) if b not in stand_ins)}
    vocab = {stand_ins[byte]: byte for byte in range(256)} | {"<end>": END}
    vocab |= {stamp_text(ticks): END + 1 + ticks for ticks in range(STAMP_TICKS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return tokenizer


@dataclass(slots=True)
class VllmScript:
    """How the fake vLLM answers; a request may override fields with x-fake-<field> headers."""

    first_token: int = ord("H")
    status: int = 200
    delay_s: float = 0.0
    finish_reason: str = "length"
    hand_over: bool = True  # answer a claim as the connector does
    plain_text: str = "plain"  # of a request without a claim, one byte a token
    plain_stamps: int = 0  # instead of the text: so many stamped chunks
    plain_interval_s: float = 0.0
    resumed: Sequence[int] = (ord("!"), END)  # what /v1/completions goes on with


@dataclass(slots=True)
class FakeVllm:
    """An OpenAI server that remembers what it was asked."""

    script: VllmScript = field(default_factory=VllmScript)
    requests: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)  # path, headers, body
    port: int = 0
    tokens_per_prompt: int = 16  # what /tokenize counts
    remember: bool = True
    cancelled: int = 0  # requests whose client left before the answer

    def bodies(self, path: str = "/v1/chat/completions") -> list[dict[str, Any]]:
        """Return the JSON bodies that a path received."""
        return [json.loads(body) for asked, _, body in self.requests if asked == path]

    @asynccontextmanager
    async def running(self, port: int = 0, host: str = "127.0.0.1") -> AsyncIterator["FakeVllm"]:
        """Serve on a port (0: any)."""
        app = web.Application(client_max_size=_MAX_BODY)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, host, port)
        await site.start()
        self.port = runner.addresses[0][1]
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        await self._note(request)
        return web.json_response({"count": self.tokens_per_prompt, "tokens": list(range(self.tokens_per_prompt))})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await self._note(request)
        script = self._scripted(request)
        try:
            await asyncio.sleep(script.delay_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if script.status != 200:
            error = {"message": f"scripted {script.status}", "type": "scripted", "param": None, "code": script.status}
            return web.json_response({"error": error}, status=script.status)
        asked = json.loads(body)
        claimed = CLAIM_KEY in (asked.get("kv_transfer_params") or {})
        if asked.get("stream"):
            return await self._plain_stream(request, script)
        text = chr(script.first_token) if claimed else script.plain_text
        return web.json_response(
            _whole(
                "chatcmpl",
                "chat.completion",
                {"message": {"role": "assistant", "content": text}},
                text,
                script,
                claimed=claimed,
            )
        )

    async def _plain_stream(self, request: web.Request, script: VllmScript) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for index in range(script.plain_stamps or len(script.plain_text)):
            if script.plain_interval_s:
                await asyncio.sleep(script.plain_interval_s)
            text = stamp_text(now_ticks()) if script.plain_stamps else script.plain_text[index]
            choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
            chunk = {
                "id": "chatcmpl-plain",
                "object": "chat.completion.chunk",
                "created": 1,
                "model": MODEL,
                "choices": [choice],
            }
            await response.write(b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        asked = json.loads(await self._note(request))
        script = self._scripted(request)
        if not asked.get("stream"):
            claimed = CLAIM_KEY in (asked.get("kv_transfer_params") or {})
            text = chr(script.first_token) if claimed else script.plain_text
            return web.json_response(_whole("cmpl", "text_completion", {"text": text}, text, script, claimed=claimed))
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for index, token in enumerate(script.resumed):
            finish = "stop" if token == END else "length" if index == len(script.resumed) - 1 else None
            choice = {"index": 0, "text": "", "token_ids": [token], "finish_reason": finish}
            await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _note(self, request: web.Request) -> bytes:
        body = await request.read()
        if self.remember:
            self.requests.append((request.path, dict(request.headers), body))
        return body

    def _scripted(self, request: web.Request) -> VllmScript:
        script = VllmScript(**{name: getattr(self.script, name) for name in VllmScript.__dataclass_fields__})
        for name, convert in (("status", int), ("delay_s", float), ("finish_reason", str)):
            value = request.headers.get(f"x-fake-{name.replace('_', '-')}")
            if value is not None:
                setattr(script, name, convert(value))
        return script


def _whole(prefix: str, kind: str, said: dict[str, Any], text: str, script: VllmScript, *, claimed: bool) -> dict[str, Any]:
    handed = {CLAIM_KEY: {"first_token": script.first_token, "prompt_tail": list(PROMPT_IDS), "serving": SERVING}}
    finish = script.finish_reason if claimed else "stop"
    return {
        "id": f"{prefix}-{time.monotonic_ns()}",  # an answer tells when it was given
        "object": kind,
        "created": int(time.time()),
        "model": MODEL,
        "choices": [{"index": 0, **said, "finish_reason": finish, "stop_reason": None, "logprobs": None}],
        "usage": {
            "prompt_tokens": len(PROMPT_IDS),
            "total_tokens": len(PROMPT_IDS) + len(text),
            "completion_tokens": len(text),
        },
        "kv_transfer_params": handed if claimed and script.hand_over else None,
    }


@dataclass(slots=True)
class DaemonScript:
    """How the fake daemon serves a stream."""

    tokens: Sequence[int] = (*b"ello", END)  # after the first token; END finishes with "stop"
    silence_s: float = 0.0  # from landing to the first of these tokens
    interval_s: float = 0.0
    batch: int = 1  # tokens in one message
    refuse: str | None = None  # answer Failed with this code instead of Reserved
    fail_after: int | None = None  # answer Failed after so many tokens
    hang_after: int | None = None  # say nothing more after so many tokens
    stamp: bool = False  # send stamps instead of the tokens, all but the last


@dataclass(slots=True)
class FakeDaemon:
    """A daemon without an engine: real gRPC, real leases, scripted tokens."""

    script: DaemonScript = field(default_factory=DaemonScript)
    slots: int = 2
    context_tokens: int = 4096
    requests: list[pb.DecodeRequest] = field(default_factory=list)
    remember: bool = True
    cancelled: int = 0
    served: int = 0  # requests that held a slot and have ended
    draining: bool = False
    floors: list[int] = field(default_factory=list)
    in_use: list[int | None] = field(default_factory=list)
    node: Node | None = None
    _advertiser: Advertiser | None = None
    _table: LeaseTable | None = None

    @asynccontextmanager
    async def running(self, redis_url: str, *, ttl_ms: int = 1000) -> AsyncIterator["FakeDaemon"]:
        """Serve and stay registered."""
        self.floors, self.in_use = [0] * self.slots, [None] * self.slots
        card = pb.ModelCard(
            model=MODEL,
            identity="fake",
            context_tokens=self.context_tokens,
            tokenizer=byte_tokenizer().to_str().encode(),
            stop_token_ids=[END],
            eos_token_id=END,
            vocab_size=END + 1 + STAMP_TICKS,
            fingerprint=card_name(self.context_tokens),
        )
        async with AsyncExitStack() as stack:
            server = grpc.aio.server()
            add_DecoderServicer_to_server(_FakeDecoder(self, card), server)
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            stack.push_async_callback(server.stop, None)
            self._table = await stack.enter_async_context(LeaseTable(redis_url, ttl_ms=ttl_ms, landing_ms=1000))
            self.node = Node(
                node_id=uuid.uuid4().hex,
                model=MODEL,
                card=card.fingerprint,
                decode_endpoint=f"127.0.0.1:{port}",
                control_host="127.0.0.1",
                control_port=1,
                capacity_tokens=self.context_tokens,
                slots=self.slots,
            )
            self._advertiser = await stack.enter_async_context(
                Advertiser(self._table, self.node, self._look, lambda states: None)
            )
            yield self

    def drain(self) -> None:
        """Tell the table to give out no slot of this daemon any more; what runs goes on."""
        assert self._advertiser is not None, "a daemon drains within running()"
        self.draining = True
        self._advertiser.kick()

    def _look(self) -> tuple[NodeStatus, list[SlotView]]:
        status = NodeStatus(idle=not any(self.in_use), draining=self.draining, served=self.served)
        states = ["decoding" if epoch else "free" for epoch in self.in_use]
        return status, [SlotView(slot, self.floors[slot], self.in_use[slot], states[slot]) for slot in range(self.slots)]

    async def serve(self, request: pb.DecodeRequest, write: Callable[[pb.DecodeEvent], Any]) -> None:
        """Serve one stream as scripted."""
        assert self._advertiser is not None, "serve runs within running()"
        if self.remember:
            self.requests.append(request)
        if self.script.refuse is not None:
            await write(pb.DecodeEvent(failed=pb.Failed(code=self.script.refuse, message="scripted")))
            return
        self.floors[request.slot] = self.in_use[request.slot] = request.epoch
        self._advertiser.kick()
        try:
            await write(pb.DecodeEvent(reserved=pb.Reserved()))
            landed = pb.Landed(prompt_token_ids=PROMPT_IDS, first_token=ord("H"), bytes=1, transfer_seconds=0.001)
            await write(pb.DecodeEvent(landed=landed))
            await asyncio.sleep(self.script.silence_s)
            await self._decode(request, write)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_use[request.slot] = None
            self.served += 1
            self._advertiser.kick()
            await asyncio.shield(self._release(request.slot, request.epoch))

    async def _decode(self, request: pb.DecodeRequest, write: Callable[[pb.DecodeEvent], Any]) -> None:
        script, sent, position = self.script, 0, 1
        tokens = list(script.tokens)[: max(0, request.max_tokens - 1) or None]
        while sent < len(tokens):
            if script.fail_after is not None and sent >= script.fail_after:
                await write(pb.DecodeEvent(failed=pb.Failed(code="scripted", message="scripted")))
                return
            if script.hang_after is not None and sent >= script.hang_after:
                await asyncio.Event().wait()
            if script.interval_s:
                await asyncio.sleep(script.interval_s)
            ids = tokens[sent : sent + script.batch]
            taken = len(ids)
            last = sent + taken == len(tokens)
            if last and position + taken < request.max_tokens:
                ids[-1] = END  # the script is over before the answer may be cut
            finish = pb.Tokens.STOP if ids[-1] == END else pb.Tokens.LENGTH if last else pb.Tokens.NONE
            if script.stamp and not last:
                ids = [END + 1 + now_ticks()]
            await write(pb.DecodeEvent(tokens=pb.Tokens(position=position, ids=ids, finish=finish)))
            sent, position = sent + taken, position + len(ids)

    async def _release(self, slot: int, epoch: int) -> None:
        assert self.node is not None, "serve runs within running()"
        assert self._table is not None
        try:
            await self._table.release(MODEL, self.node.node_id, slot, epoch)
        except LeasesUnavailable:
            return  # the heartbeat says the same once Redis is back


class _FakeDecoder(DecoderServicer):
    def __init__(self, daemon: FakeDaemon, card: pb.ModelCard) -> None:
        self._daemon = daemon
        self._card = card

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.ModelCard:  # noqa: N802 - gRPC's name
        return self._card

    async def Decode(self, request: pb.DecodeRequest, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        await self._daemon.serve(request, context.write)


async def serve_vllm(port: int, script: VllmScript) -> None:
    """Run a fake vLLM that remembers nothing, until cancelled."""
    async with FakeVllm(script=script, remember=False).running(port):
        await asyncio.Event().wait()


async def serve_daemon(redis_url: str, script: DaemonScript, *, slots: int, context_tokens: int) -> None:
    """Run a fake daemon that remembers nothing, until cancelled."""
    async with FakeDaemon(script=script, slots=slots, context_tokens=context_tokens, remember=False).running(redis_url):
        await asyncio.Event().wait()
