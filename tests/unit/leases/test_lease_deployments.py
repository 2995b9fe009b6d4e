"""The lease table lives its whole life on every server program there is, over TLS, and with the rights that are documented."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from leases import LeasesUnavailable, LeaseTable
from tests.kit.deployments import (
    EACH_PROGRAM,
    PROGRAMS,
    documented_rights,
    forget_scripts_of,
    lease_table,
    live,
    user,
)
from tests.kit.servers import HOST, Server, speaks_tls
from tests.kit.tls import Certificates, relay
from tests.kit.valkey import acquire, eventually, node, register

DENIED = r"failed \(.*(permission|executing the script can.t|can.t access).*; limit"
WITH_TLS = [program for program in PROGRAMS.values() if speaks_tls(program)]


# --- One server ---


@pytest.fixture(scope="module")
def server(program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(program, tmp_path_factory.mktemp("server"))
    try:
        running.start()
        yield running
    finally:
        running.stop()


@EACH_PROGRAM
async def test_one_server(server: Server) -> None:
    await live(server.url, forget_scripts_of(server))


@EACH_PROGRAM
@pytest.mark.parametrize("options", ["/5", "?protocol=2", "?protocol=3&health_check_interval=1&client_name=lane"])
async def test_options_of_the_url_hold(server: Server, options: str) -> None:
    await live(server.url + options, forget_scripts_of(server))


# --- User and password, with no more rights than the documentation asks for ---


@EACH_PROGRAM
async def test_the_documented_rights_are_enough(server: Server) -> None:
    async with user(documented_rights(), server) as who:
        await live(f"redis://{who}@{HOST}:{server.port}", forget_scripts_of(server))
    assert await server.tell("ACL", "LOG") == []


@EACH_PROGRAM
async def test_each_of_the_documented_rights_is_needed(server: Server) -> None:
    for right in documented_rights():
        async with user([other for other in documented_rights() if other != right], server) as who:
            living = asyncio.create_task(live(f"redis://{who}@{HOST}:{server.port}", forget_scripts_of(server)))

            async def decided(living: asyncio.Task[None] = living) -> bool:
                return living.done() or await server.tell("ACL", "LOG") != []

            await eventually(decided)
            await asyncio.wait([living], timeout=1)  # who was refused a wake-up still waits for it
            living.cancel()
            await asyncio.gather(living, return_exceptions=True)
            assert await server.tell("ACL", "LOG"), f"nobody missed {right}"
            await server.tell("FLUSHALL")


@EACH_PROGRAM
async def test_a_missing_right_is_said(server: Server) -> None:
    for right in ("+evalsha", "+zadd", "~anchorleg:leases:*"):
        rights = [other for other in documented_rights() if other != right]
        async with user(rights, server) as who, lease_table(f"redis://{who}@{HOST}:{server.port}") as table:
            with pytest.raises(
                LeasesUnavailable, match=r"failed \(.*(permission|executing the script can.t|can.t access).*; limit"
            ) as caught:
                await register(table, node())
            assert "p@ss" not in str(caught.value)


@EACH_PROGRAM
async def test_a_wrong_password_is_named_and_not_shown(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    async with user(documented_rights(), server) as who, LeaseTable(f"redis://not-{who}@{HOST}:{server.port}") as table:
        for call in (table.ping(), acquire(table, wait_ms=100)):
            with pytest.raises(LeasesUnavailable, match="password") as caught:
                await call
            assert "p%40ss" not in str(caught.value)
            assert "p@ss" not in str(caught.value)
    assert "p@ss" not in caplog.text
    assert "p%40ss" not in caplog.text


# --- TLS ---


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


@asynccontextmanager
async def behind_tls(
    program: Path, folder: Path, given: Certificates, *, clients: bool = False
) -> AsyncIterator[tuple[Server, str]]:
    """A server and the start of its URL: with TLS of its own where it has some, else behind a relay."""
    own = program in WITH_TLS
    running = Server(program, folder, tls=given.server_options(clients=False) if own and not clients else ())
    try:
        running.start()
        if own and not clients:
            yield running, f"rediss://{HOST}:{running.port}"
        else:
            async with relay(lambda: running, given.context(clients=clients)) as port:
                yield running, f"rediss://{HOST}:{port}"
    finally:
        running.stop()


@EACH_PROGRAM
async def test_tls(program: Path, tmp_path: Path, certificates: Certificates) -> None:
    async with behind_tls(program, tmp_path, certificates) as (server, url):
        await live(f"{url}?ssl_ca_certs={certificates.authority}", forget_scripts_of(server))


@EACH_PROGRAM
async def test_tls_with_a_certificate_of_the_client(program: Path, tmp_path: Path, certificates: Certificates) -> None:
    async with behind_tls(program, tmp_path, certificates, clients=True) as (server, url):
        url += f"?ssl_ca_certs={certificates.authority}"
        shown = f"&ssl_certfile={certificates.certificate}&ssl_keyfile={certificates.key}"
        await live(url + shown, forget_scripts_of(server))
        async with lease_table(url) as table:
            with pytest.raises(LeasesUnavailable):
                await table.ping()


@EACH_PROGRAM
async def test_a_server_of_another_authority_is_refused(program: Path, tmp_path: Path, certificates: Certificates) -> None:
    others = Certificates.make(tmp_path / "others")
    async with behind_tls(program, tmp_path, certificates) as (_, url):
        for trusted in ("", f"?ssl_ca_certs={others.authority}"):
            async with lease_table(url + trusted) as table:
                with pytest.raises(LeasesUnavailable, match=rf"{HOST}.*certificate verify failed"):
                    await table.ping()


@EACH_PROGRAM
async def test_a_server_without_tls_is_refused_where_the_url_wants_it(server: Server) -> None:
    async with lease_table(server.url.replace("redis:", "rediss:")) as table:
        with pytest.raises(LeasesUnavailable, match=r"(?i)timeout connecting|ssl"):
            await table.ping()
