"""How a whole daemon stops: nothing new, what runs to its end, and never a clean end for what does not reach it."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc.aio

from decode_daemon.daemon import running
from decode_daemon.slots import SlotState
from handoff import decode_pb2 as pb
from handoff.claim import Claim, ClaimKeys, to_bytes
from handoff.decode_pb2_grpc import DecoderStub
from leases import Denied, LeaseTable, NoSlot
from tests.kit.daemon import NAME, SECRET, DaemonLane, Reference, Running, read, settings
from tests.kit.streaming import Endless, ScriptedEngine, Serve, counting, event, rest
from tests.kit.valkey import ValkeyProcess


@asynccontextmanager
async def draining(lane: Running) -> AsyncIterator[asyncio.Task[None]]:
    """Begin to stop the daemon; yields the stop, which is to end within the block, once the table knows."""
    here, stack = lane
    stopped = asyncio.create_task(stack.aclose())
    try:
        await here.shows(lambda node: node.status.draining)
        yield stopped
    finally:
        await asyncio.wait_for(stopped, 10)


async def gone(here: DaemonLane) -> bool:
    return NAME not in await here.table.inspect()


async def test_a_stream_in_flight_is_finished_while_the_table_gives_out_nothing_more(
    lane: Running, reference: Reference
) -> None:
    here, _ = lane
    grant, call = await here.reserved()
    async with draining(lane) as stopped:
        assert await here.acquire() == Denied(NoSlot.UNKNOWN_POOL)
        await here.shows(lambda node: node.slots[grant.slot].epoch == grant.epoch)
        assert await here.served(grant, call, reference) == reference.tokens
        await asyncio.wait_for(stopped, 2)
        assert await gone(here)


async def test_a_lease_from_before_the_drain_is_served_in_it_and_heartbeats_go_on(lane: Running, reference: Reference) -> None:
    here, _ = lane
    before, call = await here.reserved()
    late = await here.grant()
    async with draining(lane) as stopped:
        late_call = here.decode(late)
        await read(late_call, "reserved")
        await here.shows(lambda node: {slot.state for slot in node.slots} == {"landing"})
        for grant, stream in ((before, call), (late, late_call)):
            assert await here.served(grant, stream, reference) == reference.tokens
        await asyncio.wait_for(stopped, 2)
        assert await gone(here)


async def test_a_daemon_with_nothing_to_do_waits_for_the_holder_of_its_last_lease(lane: Running, reference: Reference) -> None:
    here, _ = lane
    grant = await here.grant()
    async with draining(lane) as stopped:
        call = here.decode(grant)
        await read(call, "reserved")
        assert await here.served(grant, call, reference) == reference.tokens
        await asyncio.wait_for(stopped, 2)


async def test_a_lease_that_nobody_uses_delays_the_stop_for_seconds_and_not_for_the_whole_drain(
    model_dir: Path, valkey: ValkeyProcess, table: LeaseTable
) -> None:
    async with AsyncExitStack() as stack:
        daemon = await stack.enter_async_context(running(settings(model_dir, valkey, drain_timeout_s=30.0)))
        async with grpc.aio.insecure_channel(daemon.node.decode_endpoint) as channel:
            here = DaemonLane(daemon, DecoderStub(channel), table)
            await here.grant()
            await asyncio.wait_for(stack.aclose(), 4)
            assert await gone(here)


async def test_an_idle_daemon_stops_at_once(lane: Running) -> None:
    here, stack = lane
    await here.shows(lambda node: node.status.idle)
    began = time.monotonic()
    await stack.aclose()
    assert time.monotonic() - began < 1
    assert await gone(here)


async def test_a_stream_that_does_not_end_in_time_is_cut_with_an_error(
    model_dir: Path, valkey: ValkeyProcess, table: LeaseTable
) -> None:
    async with AsyncExitStack() as stack:
        daemon = await stack.enter_async_context(running(settings(model_dir, valkey, drain_timeout_s=0.1)))
        async with grpc.aio.insecure_channel(daemon.node.decode_endpoint) as channel:
            here = DaemonLane(daemon, DecoderStub(channel), table)
            _, call = await here.reserved()
            await asyncio.wait_for(stack.aclose(), 3)
            cut = await read(call, "failed")
            assert (cut.code, cut.message) == ("draining", "this daemon has shut down before the answer was whole")
            assert await gone(here)
    assert [slot.epoch_in_use for slot in daemon.slots] == [None, None]


async def test_without_redis_a_daemon_stops_in_bounded_time_and_tells_its_streams(model_dir: Path, tmp_path: Path) -> None:
    redis = ValkeyProcess(tmp_path)
    redis.start()
    try:
        async with AsyncExitStack() as stack:
            daemon = await stack.enter_async_context(running(settings(model_dir, redis, drain_timeout_s=1.0)))
            redis.stop()
            async with grpc.aio.insecure_channel(daemon.node.decode_endpoint) as channel:
                claim = ClaimKeys([SECRET.encode()]).sign(Claim("h", "127.0.0.1", 1, 0, 2**40, 2**40))
                request = pb.DecodeRequest(handoff_id="h", slot=0, epoch=2**40, claim=to_bytes(claim))
                call = DecoderStub(channel).Decode(request)
                await read(call, "reserved")
                closing = asyncio.create_task(stack.aclose())
                assert (await read(call, "failed")).code == "draining"
                await asyncio.wait_for(closing, 5)
    finally:
        redis.stop()


async def test_a_daemon_that_is_draining_serves_the_leases_it_still_has(serve: Serve) -> None:
    server = await serve(ScriptedEngine(counting(1, 1)))
    server.service.draining = True
    assert (await rest(await server.landed()))[-1].tokens.finish == pb.Tokens.LENGTH
    await asyncio.wait_for(server.service.settle(), 1)
    assert server.slots[0].state is SlotState.FREE


async def test_a_cut_ends_what_runs_and_what_waits_with_an_error_and_refuses_what_comes(serve: Serve) -> None:
    script = Endless(paced=True)
    server = await serve(ScriptedEngine(script))
    decoding = await server.landed(0)
    script.pace.release()
    assert (await event(decoding)).HasField("tokens")
    landing = server.decode(1)
    assert (await event(landing)).HasField("reserved")
    server.service.cut()
    for call in (decoding, landing):
        assert [one.failed.code for one in await rest(call)] == ["draining"]
    await asyncio.wait_for(server.service.settle(), 1)
    assert script.stopped.is_set()
    assert server.ended("draining") == 2
    (refusal,) = await rest(server.decode(0))
    assert refusal.failed.code == "draining"
