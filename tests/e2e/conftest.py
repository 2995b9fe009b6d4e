"""Everything real: Envoy, valkey, vLLM with the connector, NIXL, two decode daemons and SmolLM2, in float32.

bfloat16 has ties that two runs of one engine break differently; in float32 both lanes must say the same, token for token.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from cli.model import prepare
from cli.settings import MODEL_NAME, LocalSettings
from cli.stack import Stack
from tests.kit.e2e import Lane, quiet
from tests.kit.engine_core import LOG_REQUESTS
from tests.kit.narrow import Narrow, narrow_vllm

MODEL_DIR = Path(__file__).parents[2] / ".anchorleg" / "models" / MODEL_NAME


@pytest.fixture(scope="session")
def model_dir() -> Path:
    prepare(MODEL_DIR)
    return MODEL_DIR


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def shared_lane(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lane]:
    settings = LocalSettings.load(
        ports="auto",
        dtype="float32",
        eager=True,
        daemons=2,
        model_dir=model_dir,
        state_dir=tmp_path_factory.mktemp("stack"),
        # Small chunks, so that prompts of a few hundred tokens are sent chunk by chunk.
        vllm_arg=["--max-num-batched-tokens", "512", "--max-num-seqs", "16", LOG_REQUESTS],
    )
    environment = {
        # Tests stop a daemon in mid-stream; the gateway's own 30 s would make each of them wait as long.
        "ANCHORLEG_GATEWAY_STALL_TIMEOUT_S": "3",
        # Tests lose a writer's last words; its slot would be waited for that much longer.
        "ANCHORLEG_DAEMON_WRITER_GRACE_S": "2",
        # An answer that vLLM makes because the machine was busy would say nothing about the daemon.
        "ANCHORLEG_GATEWAY_QUEUE_TIMEOUT_S": "30",
        # vLLM would compile small functions of its sampler with the first request.
        "TORCH_COMPILE_DISABLE": "1",
    }
    async with (
        Stack(settings, environment=environment) as stack,
        httpx.AsyncClient(base_url=stack.base_url, timeout=120.0) as client,
    ):
        lane = Lane(stack, settings, client)
        await lane.wait_for_slots()
        # The first requests pay for kernels and connections; no test shall wait for that.
        await asyncio.gather(lane.ask("hello", latency=True, max_tokens=2), lane.ask("hello", latency=False, max_tokens=2))
        yield lane


@pytest_asyncio.fixture(loop_scope="session")
async def lane(shared_lane: Lane) -> AsyncIterator[Lane]:
    """The lane; after the test every slot must be free and vLLM must hold no block."""
    yield shared_lane
    await quiet(shared_lane)


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def narrow(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Narrow]:
    async with narrow_vllm(tmp_path_factory.mktemp("narrow"), model_dir) as started:
        yield started
