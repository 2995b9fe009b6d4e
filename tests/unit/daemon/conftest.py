import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc.aio
import pytest
import structlog
import torch
import transformers
from tokenizers import Tokenizer, models

from decode_daemon.daemon import running
from handoff.decode_pb2_grpc import DecoderStub
from handoff.identity import model_digest
from handoff.messages import ModelIdentity, Welcome
from leases import LeaseTable
from tests.kit.control import Voice
from tests.kit.daemon import CONTEXT, LAYOUT, NAME, DaemonLane, Reference, Running, reference_of, settings
from tests.kit.handoff import Landing, landing, prefill
from tests.kit.streaming import Serve, serving
from tests.kit.valkey import ValkeyProcess

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of vLLM's own making
    import connector  # noqa: F401


SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@pytest.fixture
async def daemon() -> AsyncIterator[Landing]:
    async with landing() as here:
        yield here


@pytest.fixture(autouse=True, scope="package")
def short_tracebacks() -> Iterator[None]:
    """Errors are logged without the values of all variables, which takes seconds for tensors."""
    structlog.configure(processors=[structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)])
    yield
    structlog.reset_defaults()


@pytest.fixture
async def worker(daemon: Landing) -> AsyncIterator[Voice]:
    """A connector that has been welcomed."""
    async with Voice(daemon.port) as voice:
        assert isinstance(await voice.hello(), Welcome)
        yield voice


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    async with serving() as start:
        yield start


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + ("norm" in name))
    model.save_pretrained(folder)
    words = models.WordLevel({f"w{index}": index for index in range(97)}, unk_token="w0")
    Tokenizer(words).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyProcess]:
    with ValkeyProcess(tmp_path_factory.mktemp("valkey")) as process:
        yield process


@pytest.fixture
async def table(valkey: ValkeyProcess) -> AsyncIterator[LeaseTable]:
    async with LeaseTable(valkey.url) as client:
        yield client


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Reference:
    return reference_of(model_dir)


@pytest.fixture
async def lane(model_dir: Path, valkey: ValkeyProcess, table: LeaseTable, reference: Reference) -> AsyncIterator[Running]:
    """A daemon that a test may stop by closing the stack."""
    identity = ModelIdentity(NAME, model_digest(model_dir), CONTEXT)
    caches = [cache.view(torch.uint8) for cache in reference.caches]
    async with AsyncExitStack() as stack:
        daemon = await stack.enter_async_context(running(settings(model_dir, valkey)))
        with prefill(layout=LAYOUT, caches=caches, model=identity) as worker:
            async with grpc.aio.insecure_channel(daemon.node.decode_endpoint) as channel:
                yield DaemonLane(daemon, DecoderStub(channel), table, worker), stack
