"""A whole daemon: real engine, real lease table, real transport, real streams."""

import asyncio
import socket
import urllib.request
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from decode_daemon.daemon import running
from decode_daemon.slots import SlotState
from handoff import decode_pb2 as pb
from handoff.identity import model_digest
from leases import Grant
from process.errors import PortBusyError
from tests.kit.daemon import CONTEXT, LAYOUT, NAME, PROMPT, Reference, Running, answer, read, settings
from tests.kit.valkey import ValkeyProcess, eventually


async def test_a_prompt_that_was_handed_over_is_answered_as_if_it_had_been_computed_here(
    lane: Running, reference: Reference
) -> None:
    here, _ = lane
    for _ in range(2):
        grant, call = await here.reserved()
        await here.hand_over(grant, reference)
        landed = await read(call, "landed")
        assert (list(landed.prompt_token_ids), landed.first_token) == (PROMPT, reference.first_token)
        assert landed.bytes == LAYOUT.bytes_for(len(PROMPT))
        assert await answer(call) == reference.tokens

        async def all_free() -> bool:
            return await here.free_slots() == 2

        await eventually(all_free, within_s=2)
    assert here.worker is not None
    assert here.worker.failed == []


async def test_the_daemon_publishes_its_slots_its_card_and_its_metrics(lane: Running, model_dir: Path) -> None:
    here, _ = lane
    card = await here.stub.Describe(pb.DescribeRequest())
    assert (card.model, card.identity, card.context_tokens) == (NAME, model_digest(model_dir), CONTEXT)
    assert Tokenizer.from_str(card.tokenizer.decode()).id_to_token(5) == "w5"
    grant = await here.grant()
    assert (grant.card, grant.capacity_tokens, grant.node_id) == (card.fingerprint, CONTEXT, here.daemon.node.node_id)
    assert grant.decode_endpoint == here.daemon.node.decode_endpoint
    call = here.decode(grant)
    await read(call, "reserved")
    url = f"http://127.0.0.1:{here.daemon.metrics_port}/metrics"
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=5).read().decode())
    assert 'anchorleg_slots{state="landing"} 1.0' in text
    assert 'anchorleg_slots{state="free"} 1.0' in text
    call.cancel()


async def test_a_request_may_name_as_many_ids_as_are_taken(lane: Running) -> None:
    here, _ = lane
    most = 1 << 19
    call = here.decode(await here.grant(), logit_bias=dict.fromkeys(range(most), 1.0))
    await read(call, "reserved")
    call.cancel()
    refusal = await read(here.decode(await here.grant(), logit_bias=dict.fromkeys(range(most + 1), 1.0)), "failed")
    assert refusal.code == "bad_request"


async def test_the_table_shows_how_long_a_daemon_is_busy_which_falls_while_it_decodes(
    lane: Running, reference: Reference
) -> None:
    here, _ = lane
    await here.shows(lambda node: node.status.idle and node.status.busy_ms == 0)
    grant, call = await here.reserved()
    await here.shows(lambda node: node.status.busy_ms > 0 and not node.status.idle)
    await here.shows(lambda node: node.slots[grant.slot].state == "landing")
    slot, owed, busy_ms = here.daemon.slots[grant.slot], [], []

    async def watch() -> None:
        while slot.state is not SlotState.FREE:
            owed.append(slot.owed)
            busy_ms.append(here.daemon.presence.status().busy_ms)
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    assert await here.served(grant, call, reference) == reference.tokens
    await asyncio.wait_for(watching, 2)
    assert owed == sorted(owed, reverse=True)
    assert len(set(owed)) > 5
    assert busy_ms[0] > busy_ms[-1]
    await here.shows(lambda node: node.status.idle and node.status.busy_ms == 0 and node.status.served == 1)


async def test_a_slot_goes_to_a_waiter_as_soon_as_the_daemon_has_finished_with_it(lane: Running, reference: Reference) -> None:
    here, _ = lane
    grant, call = await here.reserved()
    other, _ = await here.reserved()
    waiting = asyncio.create_task(here.acquire(wait_ms=5_000))

    async def queued() -> bool:
        return len((await here.table.inspect())[NAME].queue) == 1

    await eventually(queued)
    await here.served(grant, call, reference)
    granted = await asyncio.wait_for(waiting, 0.5)
    assert isinstance(granted, Grant)
    assert granted.slot == grant.slot
    assert granted.epoch > other.epoch
    next_call = here.decode(granted)
    await read(next_call, "reserved")
    assert await here.served(granted, next_call, reference) == reference.tokens


async def test_a_client_that_leaves_gives_its_slot_back_to_the_table(lane: Running) -> None:
    here, _ = lane
    grant, call = await here.reserved()

    async def one_free() -> bool:
        return await here.free_slots() == 1

    async def two_free() -> bool:
        return await here.free_slots() == 2

    await eventually(one_free)
    call.cancel()
    await eventually(two_free, within_s=1)
    (refused,) = [await read(here.decode(grant), "failed")]  # the lease is over, whatever its holder thinks
    assert refused.code == "stale_epoch"


@pytest.mark.parametrize("port", ["decode_port", "control_port", "metrics_port"])
async def test_a_busy_port_ends_the_start_by_name_and_leaves_nothing_behind(
    model_dir: Path, valkey: ValkeyProcess, port: str
) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        taken = busy.getsockname()[1]
        with pytest.raises(PortBusyError, match=f"{taken}.*--{port.replace('_', '-')}"):
            async with running(settings(model_dir, valkey, **{port: taken})):
                raise AssertionError("it started")
    before = asyncio.all_tasks()
    async with running(settings(model_dir, valkey, **{port: taken})):
        pass
    assert asyncio.all_tasks() <= before


async def test_two_daemons_cannot_share_a_port(model_dir: Path, valkey: ValkeyProcess) -> None:
    async with running(settings(model_dir, valkey)) as first:
        port = int(first.node.decode_endpoint.rsplit(":", 1)[1])
        with pytest.raises(PortBusyError, match=f"{port}.*--decode-port"):
            async with running(settings(model_dir, valkey, decode_port=port)):
                raise AssertionError("it started")


async def test_a_folder_without_a_tokenizer_is_named(model_dir: Path, valkey: ValkeyProcess, tmp_path: Path) -> None:
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).symlink_to(model_dir / file)
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json is missing"):
        async with running(settings(tmp_path, valkey)):
            raise AssertionError("it started")
