"""A whole daemon as a gateway and a connector see it: real engine, real lease table, real transport, real streams."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import SecretStr

from decode_daemon.daemon import Daemon
from decode_daemon.engine.loop import LlamaEngine
from decode_daemon.engine.protocol import DecodeParams, SamplingParams
from decode_daemon.settings import DaemonSettings
from handoff import decode_pb2 as pb
from handoff.claim import Claim, ClaimKeys, SignedClaim, to_bytes
from handoff.layout import Digit, GqaBlock, KindLayout, uniform
from handoff.messages import Final
from leases import Denied, Grant, LeaseTable, NodeReport, SlotRequest
from tests.kit.control import Voice
from tests.kit.handoff import Prefill, paged
from tests.kit.valkey import ValkeyProcess, eventually

SECRET = "a secret of the tests"
NAME = "tiny"
CONTEXT = 64
PROMPT = [5, 90, 3, 41, 17, 66, 2, 2, 31, 8, 77]
# As vLLM's CPU backend has it: heads outermost, keys transposed.
BLOCK = GqaBlock(
    kv_heads=2,
    head_dim=16,
    block_tokens=4,
    dtype="float32",
    keys=KindLayout(0, head=(Digit(2, 128),), token=(Digit(4, 1),), dim=(Digit(16, 4),)),
    values=KindLayout(64, head=(Digit(2, 128),), token=(Digit(4, 16),), dim=(Digit(16, 1),)),
)
LAYOUT = uniform(["model.layers.0.attn", "model.layers.1.attn"], BLOCK)
BLOCKS = [3, 9, 1]  # of the paged cache


def settings(model_dir: Path, valkey: ValkeyProcess, **changes: Any) -> DaemonSettings:
    given: dict[str, Any] = {
        "secret": SecretStr(SECRET),
        "redis_url": valkey.url,
        "model_dir": model_dir,
        "served_model_name": NAME,
        "dtype": "float32",
        "context_tokens": CONTEXT,
        "decode_port": 0,
        "control_port": 0,
        "metrics_port": 0,
        "writer_grace_s": 0.2,
        "drain_timeout_s": 20.0,
    }
    return DaemonSettings(**given | changes)


@dataclass
class Reference:
    """What the engine itself makes of the prompt."""

    first_token: int
    tokens: list[int]  # after the first
    caches: list[torch.Tensor]  # of vLLM, one a layer, as a connector registers them


def reference_of(model_dir: Path) -> Reference:
    """What the engine itself makes of the prompt, computed here."""
    engine = LlamaEngine.load(model_dir, dtype=torch.float32, context_tokens=CONTEXT, threads=None)
    with torch.inference_mode():
        logits = engine._model.forward(torch.tensor(PROMPT), 0)
        first = int(logits[-1].argmax())
        keys, values = engine.kv_target(len(PROMPT))
        caches = []
        for key, value in zip(keys.clone(), values.clone(), strict=True):
            cache = torch.randn(16, BLOCK.elements)
            cache[BLOCKS] = paged(BLOCK, key, value)
            caches.append(cache.clone())
        params = DecodeParams(SamplingParams(temperature=0.0), 20, frozenset())
        tokens = [token for step in engine.decode(PROMPT, first, params, lambda: False) for token in step.ids]
    return Reference(first, tokens, caches)


@dataclass
class DaemonLane:
    """A gateway's and a connector's view of one running daemon."""

    daemon: Daemon
    stub: Any
    table: LeaseTable
    worker: Prefill | None = None  # what hands over

    def wish(self, *, wait_ms: int = 0) -> SlotRequest:
        return SlotRequest(pool=NAME, card=self.daemon.node.card, tokens=CONTEXT, lease_ms=10_000, wait_ms=wait_ms)

    async def acquire(self, *, wait_ms: int = 0) -> Grant | Denied:
        return await self.table.acquire(self.wish(wait_ms=wait_ms))

    async def grant(self) -> Grant:
        async def granted() -> Grant | None:
            answer = await self.acquire()
            return answer if isinstance(answer, Grant) else None

        found = await eventually(granted)
        assert found is not None
        return found

    async def reserved(self) -> tuple[Grant, Any]:
        """A grant, and its stream, for which the daemon holds the slot."""
        grant = await self.grant()
        call = self.decode(grant)
        await read(call, "reserved")
        return grant, call

    async def served(self, grant: Grant, call: Any, reference: Reference) -> list[int]:
        """The tokens of a reserved stream, once the prompt is handed over."""
        await self.hand_over(grant, reference)
        await read(call, "landed")
        return await answer(call)

    async def node(self) -> NodeReport | None:
        """The daemon as the table has it."""
        report = (await self.table.inspect()).get(NAME)
        found = [one for one in report.nodes if one.node == self.daemon.node] if report else []
        return found[0] if found else None

    async def shows(self, look: Callable[[NodeReport], bool], *, within_s: float = 2.0) -> None:
        """Return once the table shows the daemon so."""

        async def holds() -> bool:
            node = await self.node()
            return node is not None and look(node)

        await eventually(holds, within_s=within_s)

    def claim(self, grant: Grant) -> SignedClaim:
        claim = Claim(f"handoff-{grant.epoch}", grant.control_host, grant.control_port, grant.slot, grant.epoch, 2**40)
        return ClaimKeys([SECRET.encode()]).sign(claim)

    def decode(self, grant: Grant, **fields: Any) -> Any:
        wishes = {"max_tokens": 20, "temperature": 0.0, "top_p": 1.0} | fields
        return self.stub.Decode(
            pb.DecodeRequest(
                handoff_id=f"handoff-{grant.epoch}",
                slot=grant.slot,
                epoch=grant.epoch,
                claim=to_bytes(self.claim(grant)),
                **wishes,
            )
        )

    async def hand_over(self, grant: Grant, reference: Reference) -> None:
        """What vLLM does: blocks in two chunks, then the scheduler side's word."""
        assert self.worker is not None, "this lane was made without a worker"
        claim = self.claim(grant)
        request = self.worker.open(claim, len(PROMPT))
        self.worker.write(request, BLOCKS[:2], last=False)
        self.worker.write(request, BLOCKS[2:], first=2)
        prompt = b"".join(token.to_bytes(4, "little") for token in PROMPT)
        async with Voice(grant.control_port) as scheduler:
            await scheduler.say(Final(claim, prompt, reference.first_token, finished=False))
            await self.worker.settled(request)

    async def free_slots(self) -> int:
        pools = await self.table.pools()
        return pools[NAME].free_slots if NAME in pools else 0


Running = tuple[DaemonLane, AsyncExitStack]
"""A daemon, and the stack whose closing stops it."""


async def read(call: Any, kind: str, *, within_s: float = 5.0) -> Any:
    async with asyncio.timeout(within_s):
        event = await call.read()
    assert isinstance(event, pb.DecodeEvent), "the stream ended"
    assert event.WhichOneof("event") == kind, event
    return getattr(event, kind)


async def answer(call: Any) -> list[int]:
    """Every token to the end; positions must follow one another from 1 on."""
    ids: list[int] = []
    while True:
        step = await read(call, "tokens")
        assert step.position == 1 + len(ids)
        ids += step.ids
        if step.finish:
            return ids
