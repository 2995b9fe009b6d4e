"""What the gateway knows of daemons: their streams, their cards, and the pools they form."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from uuid import uuid4

import pytest
from redis.asyncio import Redis

from gateway.cards import Cards, read_card
from gateway.decode_client import DecodeClient, DecodeFailed
from gateway.metrics import GatewayMetrics
from gateway.pools import Pools
from handoff import decode_pb2 as pb
from leases import Grant, LeaseTable, Node, NodeStatus, SlotRequest, SlotView
from tests.kit.gateway import MODEL, bpe_tokenizer, card_message, ids_of
from tests.kit.legs import ScriptedDaemon, ScriptedVllm, failed, landed, reserved, tokens
from tests.kit.rig import rig
from tests.kit.valkey import ValkeyProcess, eventually

NOBODY = "127.0.0.1:1"


@pytest.fixture
async def client() -> AsyncIterator[DecodeClient]:
    async with DecodeClient() as opened:
        yield opened


async def never() -> pb.ModelCard:
    await asyncio.Event().wait()
    raise AssertionError


async def test_a_reserved_stream_tells_events_in_order(client: DecodeClient) -> None:
    async with ScriptedDaemon([reserved(), landed(1), tokens(1, 2, 3, finish=pb.Tokens.STOP)]).serving() as daemon:
        stream = await client.reserve(daemon.endpoint, pb.DecodeRequest(slot=3, epoch=9), 5)
        assert (await stream.read(5)).landed.first_token == 1
        assert list((await stream.read(5)).tokens.ids) == [2, 3]
        assert (daemon.requests[0].slot, daemon.requests[0].epoch) == (3, 9)
        with pytest.raises(DecodeFailed, match="too early") as caught:
            await stream.read(5)
        assert caught.value.code == "ended"


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ([failed("stale_epoch")], "stale_epoch"),
        ([landed(1)], "protocol"),
        ([pb.DecodeEvent()], "protocol"),
        ([], "ended"),
        (["die"], "unreachable"),
        (["hang"], "stalled"),
    ],
)
async def test_a_daemon_that_does_not_reserve_is_named_with_a_code(
    client: DecodeClient, script: list[pb.DecodeEvent], code: str
) -> None:
    async with ScriptedDaemon(script).serving() as daemon:
        with pytest.raises(DecodeFailed, match=daemon.endpoint) as caught:
            await client.reserve(daemon.endpoint, pb.DecodeRequest(), 0.2)
        assert caught.value.code == code


async def test_where_no_daemon_listens_is_found_at_once(client: DecodeClient) -> None:
    async with asyncio.timeout(2):
        with pytest.raises(DecodeFailed) as reserving:
            await client.reserve(NOBODY, pb.DecodeRequest(), 30)
        with pytest.raises(DecodeFailed) as describing:
            await client.describe(NOBODY, 30)
    assert reserving.value.code == describing.value.code == "unreachable"


@pytest.mark.parametrize("script", [["hang"], [reserved(), "hang"], [landed(1), "hang"]])
async def test_a_stream_that_is_given_up_is_cancelled_at_the_daemon(client: DecodeClient, script: list[pb.DecodeEvent]) -> None:
    async with ScriptedDaemon(script).serving() as daemon:
        try:
            stream = await client.reserve(daemon.endpoint, pb.DecodeRequest(), 0.2)
            stream.cancel()
            stream.cancel()
        except DecodeFailed:
            pass
        await asyncio.wait_for(daemon.cancelled.wait(), 1)


async def test_cancelling_a_reservation_cancels_it_at_the_daemon(client: DecodeClient) -> None:
    async with ScriptedDaemon(["hang"]).serving() as daemon:
        reserving = asyncio.create_task(client.reserve(daemon.endpoint, pb.DecodeRequest(), 30))

        async def asked() -> bool:
            return bool(daemon.requests)

        await eventually(asked)
        reserving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reserving
        await asyncio.wait_for(daemon.cancelled.wait(), 1)


async def test_a_stalled_read_is_bounded_and_cancels(client: DecodeClient) -> None:
    async with ScriptedDaemon([reserved(), "hang"]).serving() as daemon:
        stream = await client.reserve(daemon.endpoint, pb.DecodeRequest(), 5)
        with pytest.raises(DecodeFailed) as caught:
            await stream.read(0.05)
        assert caught.value.code == "stalled"
        stream.cancel()
        await asyncio.wait_for(daemon.cancelled.wait(), 1)


async def test_a_daemon_that_stops_is_a_failure_and_no_cancellation(client: DecodeClient) -> None:
    daemon = ScriptedDaemon([reserved(), "hang"])
    async with daemon.serving():
        stream = await client.reserve(daemon.endpoint, pb.DecodeRequest(), 5)
    with pytest.raises(DecodeFailed):
        await stream.read(5)


async def test_an_idle_channel_is_closed_and_one_with_a_running_stream_is_not() -> None:
    daemon = ScriptedDaemon([reserved(), landed(1), *(tokens(n, n) for n in range(1, 50))])
    async with daemon.serving(), DecodeClient(idle_s=0) as client:
        await client.describe(daemon.endpoint, 5)
        stream = await client.reserve(daemon.endpoint, pb.DecodeRequest(), 5)
        await client.close_idle()
        assert list(client._channels) == [daemon.endpoint]
        assert (await stream.read(5)).landed.first_token == 1
        for position in range(1, 50):
            assert (await stream.read(5)).tokens.position == position
        with pytest.raises(DecodeFailed, match="too early"):
            await stream.read(5)

        async def closed() -> bool:
            await client.close_idle()
            return not client._channels

        await eventually(closed)
        await client.describe(daemon.endpoint, 5)


async def test_a_channel_that_was_used_lately_stays_open(client: DecodeClient) -> None:
    async with ScriptedDaemon().serving() as daemon:
        await client.describe(daemon.endpoint, 5)
        await client.close_idle()
        assert list(client._channels) == [daemon.endpoint]


@pytest.mark.parametrize("cancelled", [True, False])
async def test_a_call_that_ended_in_any_way_keeps_no_channel(cancelled: bool) -> None:
    async with ScriptedDaemon(["hang"]).serving() as daemon, DecodeClient(idle_s=0) as client:
        with pytest.raises(DecodeFailed):
            await client.reserve(daemon.endpoint if cancelled else NOBODY, pb.DecodeRequest(), 0.1 if cancelled else 5)

        async def closed() -> bool:
            await client.close_idle()
            return not client._channels

        await eventually(closed)


async def test_closing_ends_running_streams() -> None:
    async with ScriptedDaemon([reserved(), "hang"]).serving() as daemon:
        async with DecodeClient() as client:
            await client.reserve(daemon.endpoint, pb.DecodeRequest(), 5)
        await asyncio.wait_for(daemon.cancelled.wait(), 1)


async def test_a_card_is_asked_for_once_by_all_who_want_it(client: DecodeClient) -> None:
    asked = 0

    async def describe() -> pb.ModelCard:
        nonlocal asked
        asked += 1
        return card_message()

    async with ScriptedDaemon(describe=describe).serving() as daemon:
        cards = Cards(client, 5)
        impatient = asyncio.create_task(cards.fetch("card-1", daemon.endpoint))
        others = [asyncio.create_task(cards.fetch("card-1", daemon.endpoint)) for _ in range(5)]
        await asyncio.sleep(0)
        impatient.cancel()
        fetched = await asyncio.gather(*others)
        assert cards.get("card-1") is fetched[0]
        assert await cards.fetch("card-1", daemon.endpoint) is fetched[0]
    assert asked == 1
    assert impatient.cancelled()


def test_a_card_says_what_the_daemon_said() -> None:
    read = read_card(card_message(temperature=0.0, top_k=0, max_tokens=7, context_tokens=99))
    assert (read.defaults.temperature, read.defaults.top_k, read.defaults.max_tokens) == (0.0, 0, 7)
    assert (read.defaults.top_p, read.defaults.min_p, read.defaults.repetition_penalty) == (None, None, None)
    assert read.tokenizer.encode("Paris").ids == ids_of("Paris")
    assert read.longest_token == max(len(token) for token in bpe_tokenizer().get_vocab())
    assert read.context_tokens == 99


def bad_cards() -> list[pb.ModelCard]:
    cards = [card_message(), card_message(), card_message(fingerprint="another")]
    cards[0].tokenizer = b"{}"
    cards[1].tokenizer = b"\xff"
    return cards


@pytest.mark.parametrize("message", bad_cards())
async def test_a_card_that_cannot_be_read_is_the_daemons_failure(client: DecodeClient, message: pb.ModelCard) -> None:
    async with ScriptedDaemon(card=message).serving() as daemon:
        cards = Cards(client, 5)
        with pytest.raises(DecodeFailed, match=daemon.endpoint):
            await cards.fetch("card-1", daemon.endpoint)
        assert cards.get("card-1") is None
        daemon.card = card_message()
        assert (await cards.fetch("card-1", daemon.endpoint)).model == MODEL


async def test_pools_show_models_slots_daemons_and_waiters_and_forget_what_is_gone(redis_url: str) -> None:
    async with LeaseTable(redis_url, timeout_s=5) as table, DecodeClient() as client:
        metrics = GatewayMetrics()
        pools = Pools(table, Cards(client, 5), client, metrics)

        def shown() -> tuple[float | None, ...]:
            value = metrics.registry.get_sample_value
            slots = [value("anchorleg_pool_slots", {"model": MODEL, "state": state}) for state in ("free", "leased")]
            return (*slots, *(value(f"anchorleg_pool_{name}", {"model": MODEL}) for name in ("nodes", "waiting")))

        async with ScriptedDaemon(slots=2).registered(redis_url), ScriptedDaemon().registered(redis_url):
            request = SlotRequest(pool=MODEL, card="card-1", tokens=10, lease_ms=60_000)
            assert isinstance(await table.acquire(request), Grant)
            await pools.start()
            assert pools.get(MODEL) is not None
            assert shown() == (2, 1, 2, 0)
            for _ in range(2):
                assert isinstance(await table.acquire(replace(request, nonce=uuid4().hex)), Grant)
            waiting = asyncio.create_task(table.acquire(replace(request, nonce="waits", wait_ms=30_000)))

            async def seen() -> bool:
                return shown() == (0, 3, 2, 1)

            await eventually(seen)
            waiting.cancel()
            await asyncio.wait([waiting])

        async def gone() -> bool:
            return pools.get(MODEL) is None

        await eventually(gone)
        assert shown() == (None, None, None, None)
        await pools.aclose()


async def test_a_card_is_had_from_another_daemon_where_one_does_not_tell_it(redis_url: str, vllm: ScriptedVllm) -> None:
    # The smaller daemon is named first.
    silent = ScriptedDaemon(describe=never, capacity=100)
    async with silent.registered(redis_url), ScriptedDaemon().registered(redis_url), rig(redis_url, vllm) as lane:
        assert lane.parts.cards.get("card-1") is not None


async def test_one_bad_daemon_keeps_no_other_away(redis_url: str, vllm: ScriptedVllm) -> None:
    broken = card_message(fingerprint="broken")
    broken.tokenizer = b"{}"
    hanging = ScriptedDaemon(card=card_message(fingerprint="hanging"), describe=never)
    async with (
        ScriptedDaemon(card=broken).registered(redis_url),
        hanging.registered(redis_url),
        ScriptedDaemon().registered(redis_url),
        rig(redis_url, vllm) as lane,
    ):
        assert lane.parts.cards.get("card-1") is not None
        assert lane.parts.cards.get("broken") is None


async def test_the_view_outlives_redis_and_whatever_is_written_there(own_valkey: ValkeyProcess, vllm: ScriptedVllm) -> None:
    url = own_valkey.url
    async with ScriptedDaemon().registered(url), rig(url, vllm) as lane:
        own_valkey.freeze()

        async def down() -> bool:
            return lane.value("anchorleg_lease_table_up") == 0

        await eventually(down)
        assert lane.parts.pools.get(MODEL) is not None
        own_valkey.thaw()

        async def up() -> bool:
            return lane.value("anchorleg_lease_table_up") == 1

        await eventually(up)


async def test_a_record_that_cannot_be_read_ends_neither_start_nor_reading(redis_url: str, vllm: ScriptedVllm) -> None:
    later = Node("later", MODEL, "card-1", NOBODY, "127.0.0.1", 1, 4096, 1)
    async with Redis.from_url(redis_url) as redis, LeaseTable(redis_url, ttl_ms=60_000, timeout_s=5) as table:
        await table.register(later, NodeStatus(), [SlotView(0, 0, None)])
        (key,) = await redis.keys("*nodes")
        await redis.hset(key, "later", '{"node":{"node_id":"later","new":1}}')
        async with rig(redis_url, vllm) as lane:
            assert lane.parts.pools.get(MODEL) is None
            await table.unregister(later)
            async with ScriptedDaemon(card=card_message(fingerprint="card-2")).registered(redis_url):

                async def seen() -> bool:
                    return lane.parts.cards.get("card-2") is not None

                await eventually(seen)
