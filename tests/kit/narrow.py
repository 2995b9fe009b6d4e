"""A real vLLM whose KV cache is as small as it may be: blocks that one prompt gives up hold another at once.

Its steps are small, so that several prefills are under way at once and blocks are taken while earlier ones are being written.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.kit.engine_core import LOG_REQUESTS
from tests.kit.prefills import BLOCK, CONTEXT, SLOW_WIRE, Prefills, VllmProcess, make_model, prefills, producer, vllm_server

SECRET = "the key of the narrow pool"
BLOCKS = CONTEXT // BLOCK  # of the whole cache: the fewest that vLLM starts with
STEP = 64  # tokens of one prompt in one step
WRITE_S = 2.0  # the connector's patience with a daemon that takes no bytes


@dataclass(frozen=True)
class Narrow:
    """The vLLM; its process may be another one after a test, at the same address."""

    process: VllmProcess
    vllm: Prefills
    model_dir: Path


@asynccontextmanager
async def narrow_vllm(folder: Path, tokenizer: Path) -> AsyncIterator[Narrow]:
    """It serves in the block."""
    model_dir = folder / "model"
    make_model(model_dir, tokenizer)
    transfer = producer(folder / "connector.toml", SECRET, write_timeout_s=WRITE_S)
    # One block more, which vLLM never gives out.
    options = ["--num-gpu-blocks-override", BLOCKS + 1, "--long-prefill-token-threshold", STEP, LOG_REQUESTS]
    async with AsyncExitStack() as stack:
        process = stack.enter_context(vllm_server(model_dir, transfer, folder / "vllm.log", *options, environment=SLOW_WIRE))
        yield Narrow(process, await stack.enter_async_context(prefills(process)), model_dir)
