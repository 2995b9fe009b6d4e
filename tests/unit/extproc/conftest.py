from collections.abc import AsyncIterator, Iterator

import pytest
from redis.asyncio import Redis

from handoff import decode_pb2 as pb
from tests.kit.gateway import PROMPT, end_id, ids_of
from tests.kit.legs import ScriptedDaemon, ScriptedVllm, landed, reserved, tokens
from tests.kit.rig import Stage, rig
from tests.kit.valkey import ValkeyProcess

FIRST, *REST = ids_of(" Paris.")


@pytest.fixture(scope="session", autouse=True)
def _no_certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test here speaks TLS, and reading every known certificate for each HTTP client takes longer than a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SSL_CERT_FILE", raising=False)
        patch.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("none")))
        yield


@pytest.fixture
async def stage(valkey: ValkeyProcess) -> AsyncIterator[Stage]:
    async with Redis.from_url(valkey.url) as client:
        await client.flushall()
    script = [reserved(), landed(FIRST, PROMPT), tokens(1, *REST), tokens(1 + len(REST), end_id(), finish=pb.Tokens.STOP)]
    async with (
        ScriptedVllm().serving() as vllm,
        ScriptedDaemon(script).registered(valkey.url) as daemon,
        rig(valkey.url, vllm) as lane,
    ):
        yield Stage(lane, daemon, vllm)
