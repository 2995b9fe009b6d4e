import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from redis.asyncio import Redis

from tests.kit.deciding import WILLING
from tests.kit.legs import ScriptedDaemon, ScriptedVllm
from tests.kit.rig import Rig, rig
from tests.kit.valkey import ValkeyProcess


@pytest.fixture(scope="session")
def oracle() -> SimpleNamespace:
    """vLLM's own classes, read once: the judge of what requests, answers and texts are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.entrypoints.openai.chat_completion import protocol as chat
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest
        from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer
    return SimpleNamespace(chat=chat, CompletionRequest=CompletionRequest, Detokenizer=FastIncrementalDetokenizer)


@pytest.fixture(scope="session", autouse=True)
def _no_certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test here speaks TLS, and reading every known certificate for each HTTP client takes longer than a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SSL_CERT_FILE", raising=False)
        patch.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("none")))
        yield


@pytest.fixture
async def redis_url(valkey: ValkeyProcess) -> str:
    """An empty lease table."""
    async with Redis.from_url(valkey.url) as client:
        await client.flushall()
    return valkey.url


@pytest.fixture
async def vllm() -> AsyncIterator[ScriptedVllm]:
    async with ScriptedVllm().serving() as server:
        yield server


@pytest.fixture
async def lane(redis_url: str, vllm: ScriptedVllm) -> AsyncIterator[Rig]:
    """One willing daemon of one slot."""
    async with ScriptedDaemon(WILLING).registered(redis_url), rig(redis_url, vllm) as made:
        yield made


@pytest.fixture
def own_valkey(tmp_path: Path) -> Iterator[ValkeyProcess]:
    """For one test to stop and freeze."""
    with ValkeyProcess(tmp_path) as process:
        yield process
