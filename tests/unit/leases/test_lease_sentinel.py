"""The lease table at a primary that sentinels watch over, before and after they replace it."""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest

from leases import Grant, LeasesUnavailable, LeaseTable
from tests.kit.deployments import (
    EACH_PROGRAM,
    documented_rights,
    forget_scripts_of,
    lease_table,
    live,
    user,
)
from tests.kit.servers import HOST, Sentinels
from tests.kit.valkey import acquire, eventually, grant, node, queued, register, release


@pytest.fixture(scope="module")
def sentinels(program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sentinels]:
    running = Sentinels(program, tmp_path_factory.mktemp("sentinels"))
    try:
        asyncio.run(running.start())
        yield running
    finally:
        running.stop()


@EACH_PROGRAM
async def test_a_primary_found_by_sentinels(sentinels: Sentinels) -> None:
    await live(sentinels.url, forget_scripts_of(sentinels.primary))


@EACH_PROGRAM
async def test_sentinels_that_do_not_answer_hide_no_other_one(sentinels: Sentinels) -> None:
    for silent in sentinels.sentinels[:2]:
        silent.freeze()
    try:
        async with LeaseTable(sentinels.url, timeout_s=1) as table:
            await table.ping()
    finally:
        for silent in sentinels.sentinels[:2]:
            silent.thaw()


@EACH_PROGRAM
async def test_sentinels_may_want_a_user_of_their_own(sentinels: Sentinels) -> None:
    asked = sentinels.sentinels[0]
    await asked.tell("ACL", "SETUSER", "asker", "reset", "on", ">s3cret/", "+sentinel|masters")
    async with user(documented_rights(), sentinels.primary) as who:
        url = f"redis+sentinel://{who}@{HOST}:{asked.port}/lane?sentinel_username=asker&sentinel_password="
        await live(url + "s3cret%2F", forget_scripts_of(sentinels.primary))
        async with lease_table(url + "another") as table:
            with pytest.raises(LeasesUnavailable, match=f"service lane of sentinels {HOST}:{asked.port}") as caught:
                await table.ping()
    assert "another" not in str(caught.value)


@EACH_PROGRAM
async def test_a_service_that_no_sentinel_knows_is_named(sentinels: Sentinels) -> None:
    async with lease_table(sentinels.url.replace("/lane", "/other")) as table:
        with pytest.raises(LeasesUnavailable, match="No master found for 'other'"):
            await table.ping()


@EACH_PROGRAM
async def test_after_a_failover_the_table_is_whole_and_no_epoch_in_use_comes_again(sentinels: Sentinels) -> None:
    kept, lost = node(model="kept"), node(model="lost")
    async with AsyncExitStack() as stack:
        daemons, patient = [await stack.enter_async_context(lease_table(sentinels.url, timeout_s=1)) for _ in range(2)]
        hasty = await stack.enter_async_context(LeaseTable(sentinels.url))
        for daemon in (kept, lost):
            await register(daemons, daemon)
        before = await grant(patient, model="kept")
        waiting = asyncio.create_task(acquire(patient, model="kept", wait_ms=60_000))
        await queued(patient, 1, model="kept")
        looking = asyncio.create_task(acquire(hasty, model="kept", wait_ms=60_000))
        await queued(hasty, 2, model="kept")
        await sentinels.replicated()
        await sentinels.cut_replica_off()
        unseen = [await grant(patient, model="lost")]
        assert await release(daemons, unseen[0])
        unseen.append(await grant(patient, model="lost"))

        sentinels.primary.stop()
        with pytest.raises(LeasesUnavailable):
            await asyncio.wait_for(looking, 5)
        await sentinels.failed_over()

        async def returned() -> bool:
            with suppress(LeasesUnavailable):
                await register(daemons, kept, floor=before.epoch, in_use=before.epoch)
                return True
            return False

        await eventually(returned, within_s=20)
        assert await release(daemons, before)
        second = await asyncio.wait_for(waiting, 5)
        assert isinstance(second, Grant)
        assert second.epoch > before.epoch
        await register(daemons, lost, floor=unseen[1].epoch, in_use=unseen[1].epoch)
        assert await release(daemons, unseen[1])
        assert (await grant(patient, model="lost")).epoch > unseen[1].epoch
