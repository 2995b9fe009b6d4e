"""One decode daemon as a gateway sees it: leases, claims, token streams, and how a handoff to it ends."""

import asyncio
import math
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc.aio

from handoff import decode_pb2 as pb
from handoff.claim import CLAIM_KEY, Claim, ClaimKeys, SignedClaim, new_handoff_id, to_bytes, to_params
from leases import Grant, LeaseTable, SlotRequest
from tests.kit.daemon import read
from tests.kit.prefills import CONTEXT, NAME, Prefills
from tests.kit.valkey import eventually

PATIENCE_S = 60.0  # with a machine that other things load
LEASE_MS = 30_000
CLAIM_S = 60


@dataclass(kw_only=True)
class Door:
    """A daemon, its lease table and its pool's secret."""

    card: str  # the daemon's model card
    stub: Any
    table: LeaseTable
    keys: ClaimKeys
    pool: str = NAME
    others: tuple[str, ...] = ()  # ids of the pool's other daemons, of which no slot is taken
    control_port: int | None = None  # what claims name instead of the daemon's own

    async def claim(
        self, keys: ClaimKeys | None = None, *, life_s: int = CLAIM_S, lease_ms: int = LEASE_MS, wait_ms: int = 5_000
    ) -> SignedClaim:
        """A claim for a slot that the table has granted."""
        wish = SlotRequest(
            pool=self.pool, card=self.card, tokens=CONTEXT, lease_ms=lease_ms, wait_ms=wait_ms, avoid=self.others
        )

        async def granted() -> Grant | None:
            answer = await self.table.acquire(wish)
            return answer if isinstance(answer, Grant) else None

        grant = await eventually(granted, within_s=PATIENCE_S + wait_ms / 1000)
        assert grant is not None
        expires = math.ceil(time.time()) + life_s
        port = self.control_port or grant.control_port
        claim = Claim(new_handoff_id(), grant.control_host, port, grant.slot, grant.epoch, expires)
        return (keys or self.keys).sign(claim)

    async def reserved(self, claim: SignedClaim, **fields: Any) -> Any:
        """The token stream of a claim, for which the daemon holds the slot. Greedy, and ends by length alone."""
        named: dict[str, Any] = {"handoff_id": claim.claim.handoff_id, "slot": claim.claim.slot, "epoch": claim.claim.epoch}
        wishes: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "top_p": 1.0} | fields
        call = self.stub.Decode(pb.DecodeRequest(**named, claim=to_bytes(claim), **wishes))
        await read(call, "reserved", within_s=PATIENCE_S)
        return call


async def handed_over(vllm: Prefills, door: Door, prompt: list[int], claim: SignedClaim | None = None) -> list[int]:
    """The ids that the lane answers: the first from vLLM, the others from the daemon. No failure is taken."""
    claim = claim or await door.claim()
    call = await door.reserved(claim)
    told = await vllm.complete(prompt, params=to_params(claim), max_tokens=1)
    found = await ended(call, prompt)
    assert isinstance(found, list), found
    first = told["kv_transfer_params"][CLAIM_KEY]["first_token"]
    assert told["choices"][0]["token_ids"] == [first] == found[:1]
    return found


async def ended(call: Any, prompt: list[int]) -> list[int] | str:
    """How a reserved stream ends: with the answer's ids, or with the code of a failure that the daemon or gRPC tells.

    What has landed must be this prompt's.
    """
    try:
        async with asyncio.timeout(PATIENCE_S):
            event = await call.read()
        assert isinstance(event, pb.DecodeEvent), "the stream ended and said nothing"
        if event.WhichOneof("event") == "failed":
            return str(event.failed.code)
        assert list(event.landed.prompt_token_ids) == prompt
        ids, step = [event.landed.first_token], None
        while step is None or not step.finish:
            step = await read(call, "tokens", within_s=PATIENCE_S)  # others may have their turn first
            assert step.position == len(ids)
            ids += step.ids
        return ids
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)


async def left(call: Any) -> None:
    """Leave a stream, as a gateway does whose client has gone; returns when the call is over."""
    call.cancel()
    with suppress(grpc.aio.AioRpcError):
        await call.code()


async def gone(asking: "asyncio.Task[Any]") -> None:
    """A client leaves its request; of what it had already got nothing is said."""
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
