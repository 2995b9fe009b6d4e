import asyncio
import os
from collections.abc import AsyncIterator
from itertools import islice
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from cli.ports import Ports, free_ports
from cli.programs import find_program
from cli.ready import why_not_ready
from cli.services import Places, redis
from cli.supervise import Supervisor
from process.metrics import serve_metrics


@pytest.fixture
async def redis_port(tmp_path: Path) -> AsyncIterator[int]:
    """The store of the stack, as `anchorleg up` starts it."""
    a, b, c, port, d, e, f, g = islice(free_ports(), 8)
    service = redis(Ports(a, b, c, port, d, e, f, g, (), (), ()), Places())
    store = Supervisor(
        [service],
        tmp_path,
        find=find_program,
        environment=dict(os.environ),
        start_timeout_s=20,
        stop_timeout_s=10,
    )
    await store.start()
    yield port
    await store.stop()


async def test_a_real_store_started_by_the_stack_answers_ping_and_keeps_nothing_on_disk(
    redis_port: int, tmp_path: Path
) -> None:
    assert await why_not_ready(f"redis://127.0.0.1:{redis_port}") is None
    assert os.listdir(tmp_path) == ["redis.log"]


async def test_an_http_answer_other_than_200_is_not_ready() -> None:
    with serve_metrics("127.0.0.1", 0, CollectorRegistry()) as port:
        assert await why_not_ready(f"http://127.0.0.1:{port}/metrics") is None
    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        told = await why_not_ready(f"http://127.0.0.1:{port}/health")
    assert told == f"http://127.0.0.1:{port}/health answered 'HTTP/1.1 503 Service Unavailable'"


async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")
    writer.close()
    await writer.wait_closed()


async def test_a_closed_port_is_told_as_the_system_tells_it() -> None:
    port = next(free_ports())
    told = await why_not_ready(f"tcp://127.0.0.1:{port}")
    assert told is not None
    assert told.startswith(f"tcp://127.0.0.1:{port}: ")


async def test_a_check_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="http://, redis:// or tcp:// with host and port, not 'ftp://x:1'"):
        await why_not_ready("ftp://x:1")
