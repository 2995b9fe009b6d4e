"""A whole daemon: real engine, real lease table, real transport, real streams."""

import asyncio
import socket
import urllib.request
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import torch
from pydantic import SecretStr
from tokenizers import Tokenizer

from decode_daemon.daemon import Daemon, running
from decode_daemon.engine.loop import LlamaEngine
from decode_daemon.engine.protocol import DecodeParams, SamplingParams
from decode_daemon.settings import DaemonSettings
from handoff import decode_pb2 as pb
from handoff.claim import Claim, ClaimKeys, SignedClaim, to_bytes
from handoff.decode_pb2_grpc import DecoderStub
from handoff.identity import model_digest
from handoff.layout import BlockLayout, Digit, KindLayout, KVLayout
from handoff.messages import Final, ModelIdentity
from leases import Grant, LeaseTable
from process.errors import PortBusyError
from tests.kit.control import Voice
from tests.kit.handoff import Prefill, comes_true, paged, prefill
from tests.kit.valkey import ValkeyProcess, eventually

SECRET = "a secret of the tests"
NAME = "tiny"
CONTEXT = 64
PROMPT = [5, 90, 3, 41, 17, 66, 2, 2, 31, 8, 77]
# As vLLM's CPU backend has it: heads outermost, keys transposed.
BLOCK = BlockLayout(
    kv_heads=2,
    head_dim=16,
    block_tokens=4,
    dtype="float32",
    keys=KindLayout(0, head=(Digit(2, 128),), token=(Digit(4, 1),), dim=(Digit(16, 4),)),
    values=KindLayout(64, head=(Digit(2, 128),), token=(Digit(4, 16),), dim=(Digit(16, 1),)),
)
LAYOUT = KVLayout(("model.layers.0.attn", "model.layers.1.attn"), BLOCK)
BLOCKS = [3, 9, 1]  # of the paged cache


@pytest.fixture
async def table(valkey: ValkeyProcess) -> AsyncIterator[LeaseTable]:
    async with LeaseTable(valkey.url) as client:
        yield client


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
        "drain_timeout_s": 3.0,
    }
    return DaemonSettings(**given | changes)


@dataclass
class Reference:
    """What the engine itself makes of the prompt."""

    first_token: int
    tokens: list[int]  # after the first
    caches: list[torch.Tensor]  # of vLLM, one a layer, as a connector registers them


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Reference:
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
class Lane:
    """A gateway's and a connector's view of one running daemon."""

    daemon: Daemon
    stub: Any
    table: LeaseTable
    worker: Prefill

    async def grant(self) -> Grant:
        async def granted() -> Grant | None:
            wish = await self.table.acquire(NAME, CONTEXT, uuid.uuid4().hex, lease_ms=10_000)
            return wish if isinstance(wish, Grant) else None

        found = await eventually(granted)
        assert found is not None
        return found

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


@pytest.fixture
async def lane(
    model_dir: Path, valkey: ValkeyProcess, table: LeaseTable, reference: Reference
) -> AsyncIterator[tuple[Lane, AsyncExitStack]]:
    """A daemon that a test may stop by closing the stack."""
    identity = ModelIdentity(NAME, model_digest(model_dir), CONTEXT)
    caches = [cache.view(torch.uint8) for cache in reference.caches]
    async with AsyncExitStack() as stack:
        daemon = await stack.enter_async_context(running(settings(model_dir, valkey)))
        with prefill(layout=LAYOUT, caches=caches, model=identity) as worker:
            async with grpc.aio.insecure_channel(daemon.node.decode_endpoint) as channel:
                yield Lane(daemon, DecoderStub(channel), table, worker), stack


Running = tuple[Lane, AsyncExitStack]


async def read(call: Any, kind: str) -> Any:
    async with asyncio.timeout(5):
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


async def test_a_prompt_that_was_handed_over_is_answered_as_if_it_had_been_computed_here(
    lane: Running, reference: Reference
) -> None:
    here, _ = lane
    for _ in range(2):
        grant = await here.grant()
        call = here.decode(grant)
        await read(call, "reserved")
        await here.hand_over(grant, reference)
        landed = await read(call, "landed")
        assert (list(landed.prompt_token_ids), landed.first_token) == (PROMPT, reference.first_token)
        assert landed.bytes == LAYOUT.bytes_for(len(PROMPT))
        assert await answer(call) == reference.tokens

        async def all_free() -> bool:
            return await here.free_slots() == 2

        await eventually(all_free, within_s=2)
    assert here.worker.failed == []


async def test_the_daemon_publishes_its_slots_its_card_and_its_metrics(lane: Running, model_dir: Path) -> None:
    here, _ = lane
    card = await here.stub.Describe(pb.DescribeRequest())
    assert (card.model, card.identity, card.context_tokens) == (NAME, model_digest(model_dir), CONTEXT)
    assert Tokenizer.from_str(card.tokenizer.decode()).id_to_token(5) == "w5"
    grant = await here.grant()
    assert (grant.card, grant.capacity_tokens, grant.node_id) == (card.fingerprint, CONTEXT, here.daemon.node.node_id)
    assert grant.decode_endpoint == here.daemon.node.decode_endpoint
    call = here.decode(grant)
    await read(call, "reserved")
    url = f"http://127.0.0.1:{here.daemon.metrics_port}/metrics"
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=5).read().decode())
    assert 'anchorleg_slots{state="landing"} 1.0' in text
    assert 'anchorleg_slots{state="free"} 1.0' in text
    call.cancel()


async def test_a_client_that_leaves_gives_its_slot_back_to_the_table(lane: Running) -> None:
    here, _ = lane
    grant = await here.grant()
    call = here.decode(grant)
    await read(call, "reserved")

    async def one_free() -> bool:
        return await here.free_slots() == 1

    async def two_free() -> bool:
        return await here.free_slots() == 2

    await eventually(one_free)
    call.cancel()
    await eventually(two_free, within_s=1)
    (refused,) = [await read(here.decode(grant), "failed")]  # the lease is over, whatever its holder thinks
    assert refused.code == "stale_epoch"


async def test_stopping_finishes_what_runs_and_leaves_the_table(lane: Running, reference: Reference) -> None:
    here, stack = lane
    grant = await here.grant()
    call = here.decode(grant)
    await read(call, "reserved")
    stopping = asyncio.create_task(stack.aclose())
    await comes_true(lambda: here.daemon.service.draining)
    await here.hand_over(grant, reference)
    await read(call, "landed")
    assert await answer(call) == reference.tokens
    await asyncio.wait_for(stopping, 4)
    assert await here.free_slots() == 0


async def test_stopping_does_not_wait_longer_than_it_was_told(
    model_dir: Path, valkey: ValkeyProcess, table: LeaseTable
) -> None:
    async with AsyncExitStack() as stack:
        daemon = await stack.enter_async_context(running(settings(model_dir, valkey, drain_timeout_s=0.1)))
        async with grpc.aio.insecure_channel(daemon.node.decode_endpoint) as channel:
            claim = ClaimKeys([SECRET.encode()]).sign(Claim("h", "127.0.0.1", 1, 0, 2**40, 2**40))
            call = DecoderStub(channel).Decode(pb.DecodeRequest(handoff_id="h", slot=0, epoch=2**40, claim=to_bytes(claim)))
            await read(call, "reserved")
            await asyncio.wait_for(stack.aclose(), 3)
            with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
                await call.read()
    assert daemon.slots[0].epoch_in_use is None


@pytest.mark.parametrize("port", ["decode_port", "control_port", "metrics_port"])
async def test_a_busy_port_ends_the_start_by_name_and_leaves_nothing_behind(
    model_dir: Path, valkey: ValkeyProcess, port: str
) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        taken = busy.getsockname()[1]
        with pytest.raises(PortBusyError, match=f"{taken}.*--{port.replace('_', '-')}"):
            async with running(settings(model_dir, valkey, **{port: taken})):
                raise AssertionError("it started")
    before = asyncio.all_tasks()
    async with running(settings(model_dir, valkey, **{port: taken})):
        pass
    assert asyncio.all_tasks() <= before


async def test_two_daemons_cannot_share_a_port(model_dir: Path, valkey: ValkeyProcess) -> None:
    async with running(settings(model_dir, valkey)) as first:
        port = int(first.node.decode_endpoint.rsplit(":", 1)[1])
        with pytest.raises(PortBusyError, match=f"{port}.*--decode-port"):
            async with running(settings(model_dir, valkey, decode_port=port)):
                raise AssertionError("it started")


async def test_a_folder_without_a_tokenizer_is_named(model_dir: Path, valkey: ValkeyProcess, tmp_path: Path) -> None:
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).symlink_to(model_dir / file)
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json is missing"):
        async with running(settings(tmp_path, valkey)):
            raise AssertionError("it started")
