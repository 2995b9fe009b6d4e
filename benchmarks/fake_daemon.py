"""A scriptable decode daemon, for what must be measured or broken without a model.

It speaks the real decode stream over gRPC, and keeps itself in the real lease table.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from benchmarks.fakes import END, MODEL, PROMPT_IDS, STAMP_TICKS, byte_tokenizer, card_name, now_ticks
from handoff import decode_pb2 as pb
from handoff.decode_pb2_grpc import DecoderServicer, add_DecoderServicer_to_server
from leases import Advertiser, LeasesUnavailable, LeaseTable, Node, NodeStatus, SlotView


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


async def serve_daemon(redis_url: str, script: DaemonScript, *, slots: int, context_tokens: int) -> None:
    """Run a fake daemon that remembers nothing, until cancelled."""
    async with FakeDaemon(script=script, slots=slots, context_tokens=context_tokens, remember=False).running(redis_url):
        await asyncio.Event().wait()
