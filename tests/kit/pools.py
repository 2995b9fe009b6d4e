"""One vLLM of two tensor-parallel ranks in front of two decode pools, each with its own secret; the test plays the gateway."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
from pydantic import SecretStr

from decode_daemon.daemon import Daemon, running
from decode_daemon.settings import DaemonSettings
from decode_daemon.slots import SlotState
from handoff.claim import ClaimKeys, SignedClaim
from handoff.decode_pb2_grpc import DecoderStub
from leases import LeaseTable
from tests.kit.doors import Door, handed_over
from tests.kit.lane import until
from tests.kit.prefills import BLOCK, CHUNK, CONTEXT, NAME, Prefills, make_model, prefills, producer, vllm_server
from tests.kit.valkey import ValkeyProcess

__all__ = ["BLOCK", "CHUNK", "PIPELINED", "Front", "Pool", "two_pools"]

PIPELINED = "pipelined"  # the pool whose connector sends layer by layer
ACCEPT_S = 20.0  # the connector's patience, with a machine that other things load


@dataclass(kw_only=True)
class Pool(Door):
    """A decode daemon in this process, which can be looked into."""

    daemon: Daemon

    def awaits(self, claim: SignedClaim) -> bool:
        """Whether some writer has begun this claim's handoff and it is not whole."""
        held = self.daemon.slots[claim.claim.slot].awaited
        return held is not None and held.epoch == claim.claim.epoch

    def content(self) -> list[bytes]:
        """Everything that lies in its landing memory."""
        return [slot.memory.view(slot.memory.length).numpy().tobytes() for slot in self.daemon.slots]

    @property
    def free(self) -> bool:
        return all(slot.state is SlotState.FREE for slot in self.daemon.slots)


@dataclass(kw_only=True)
class Front(Prefills):
    """The vLLM of both pools."""

    pools: dict[str, Pool]

    async def handed_over(self, pool: str, prompt: list[int], claim: SignedClaim | None = None) -> list[int]:
        """The ids that the lane answers: the first from vLLM, the others from the pool's daemon."""
        return await handed_over(self, self.pools[pool], prompt, claim)

    async def quiet(self) -> None:
        """Returns when nothing is held anywhere."""

        async def holds_nothing() -> bool:
            return await self.holds_nothing() and all(pool.free for pool in self.pools.values())

        await until(holds_nothing, "every slot is free and vLLM holds no block", 15)


@asynccontextmanager
async def decode_pool(model_dir: Path, valkey: ValkeyProcess, secret: str) -> AsyncIterator[Pool]:
    """One daemon; `secret` is its pool's, NEW,OLD while it is being changed."""
    settings = DaemonSettings(
        secret=SecretStr(secret),
        redis_url=valkey.url,
        model_dir=model_dir,
        served_model_name=NAME,
        dtype="float32",
        context_tokens=CONTEXT,
        threads=1,
        pin_threads=False,
        decode_port=0,
        control_port=0,
        metrics_port=0,
        writer_grace_s=2.0,
        drain_timeout_s=5.0,
    )
    async with AsyncExitStack() as stack:
        daemon = await stack.enter_async_context(running(settings))
        table = await stack.enter_async_context(LeaseTable(valkey.url))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(daemon.node.decode_endpoint))
        stub, keys = DecoderStub(channel), ClaimKeys(settings.signing_keys)
        yield Pool(card=daemon.node.card, stub=stub, table=table, keys=keys, daemon=daemon)


@asynccontextmanager
async def two_pools(folder: Path, tokenizer: Path, secrets: dict[str, str], *others: dict[str, Any]) -> AsyncIterator[Front]:
    """vLLM with a connector for each pool's secret, and `others`, chained; ready."""
    model_dir, log = folder / "model", folder / "vllm.log"
    make_model(model_dir, tokenizer)
    connectors = [
        producer(
            folder / f"{name}.toml",
            secret,
            pipeline_layers=name == PIPELINED,
            accept_timeout_s=ACCEPT_S,
        )
        for name, secret in secrets.items()
    ]
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [*connectors, *others]},
    }
    async with AsyncExitStack() as stack:
        process = stack.enter_context(vllm_server(model_dir, transfer, log, ranks=2))
        pools: dict[str, Pool] = {}
        for name, secret in secrets.items():
            own = folder / name
            own.mkdir()
            valkey = stack.enter_context(ValkeyProcess(own))
            pools[name] = await stack.enter_async_context(decode_pool(model_dir, valkey, secret))
        vllm = await stack.enter_async_context(prefills(process))
        yield Front(client=vllm.client, log=vllm.log, pools=pools)
