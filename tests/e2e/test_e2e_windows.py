"""Clients that leave, and messages that are lost, at the worst moments: often, and always without a trace."""

import asyncio
import os
import signal
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import grpc.aio
import httpx
import pytest
import pytest_asyncio

from handoff.claim import ClaimKeys, to_params
from handoff.decode_pb2_grpc import DecoderStub
from leases import LeaseTable
from tests.kit.doors import PATIENCE_S, Door, gone, handed_over, left
from tests.kit.e2e import Lane, quiet
from tests.kit.engine_core import standing_still, taken, takes
from tests.kit.lane import LATENCY, until
from tests.kit.notices import Notices
from tests.kit.prefills import Prefills, prompt

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

SHORT = 12  # tokens of a prompt
AT_ONCE = 2  # one in each slot
STEP_S = 0.001
OFFSETS_S = (-0.004, -0.002, 0.0, 0.002, 0.004)
ANSWER = {"max_tokens": 8}


def repeated(few: int, many: int) -> pytest.MarkDecorator:
    """How often: a few times with all other tests, many with `make endurance`."""
    return pytest.mark.parametrize("times", [few, pytest.param(many, marks=pytest.mark.endurance)])


@dataclass
class Window:
    """The lane, and its vLLM and one of its daemons as a gateway reaches them."""

    lane: Lane
    vllm: Prefills
    door: Door
    control_port: int

    async def unharmed(self) -> None:
        """Returns when nothing is held; every process that ran still does, and the next answer is vLLM's own."""
        await quiet(self.lane)
        question = "What is the capital of France?"
        assert await self.lane.ask(question, latency=True, **ANSWER) == await self.lane.ask(question, latency=False, **ANSWER)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared(shared_lane: Lane) -> AsyncIterator[Window]:
    stack, settings = shared_lane.stack, shared_lane.settings
    async with AsyncExitStack() as opened:
        table = await opened.enter_async_context(LeaseTable(f"redis://127.0.0.1:{stack.ports.redis}/0", timeout_s=20))
        report = (await table.inspect())[settings.served_model_name]
        node, *others = [one.node for one in report.nodes]
        channel = await opened.enter_async_context(grpc.aio.insecure_channel(node.decode_endpoint))
        url = f"http://127.0.0.1:{stack.ports.vllm}"
        client = await opened.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60.0))
        door = Door(
            card=node.card,
            stub=DecoderStub(channel),
            table=table,
            keys=ClaimKeys([settings.secret.get_secret_value().encode()]),
            pool=settings.served_model_name,
            others=tuple(other.node_id for other in others),
        )
        vllm = Prefills(client=client, log=stack.logs["vllm"], model=settings.served_model_name)
        await handed_over(vllm, door, prompt(SHORT))  # the connector's first words to this daemon
        yield Window(shared_lane, vllm, door, node.control_port)


@pytest_asyncio.fixture(loop_scope="session")
async def window(shared: Window) -> AsyncIterator[Window]:
    """After the test every process runs that ran before, nothing is held, and the next answer is right."""
    before = alive(shared.lane)
    yield shared
    await shared.unharmed()
    assert alive(shared.lane) == before


def alive(lane: Lane) -> dict[str, int]:
    """The processes of the stack that run, some of which other tests have ended."""
    pids = {service.name: lane.stack.pid(service.name) for service in lane.stack.services}
    return {name: pid for name, pid in pids.items() if _runs(pid)}


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@repeated(30, 200)
async def test_a_client_that_leaves_around_the_end_of_its_prefill(window: Window, times: int) -> None:
    """The moment is found as a balance is: a little earlier after a prefill that was whole, later after one that was not."""
    vllm, door = window.vllm, window.door

    async def whole(seed: int) -> float:
        claim = await door.claim()
        call = await door.reserved(claim)
        began = time.perf_counter()
        await vllm.complete(prompt(SHORT, seed), params=to_params(claim), max_tokens=1)
        took = time.perf_counter() - began
        await left(call)
        return took

    undisturbed = [
        await asyncio.gather(*map(whole, range(-seed, AT_ONCE - seed))) for seed in range(AT_ONCE, 8 * AT_ONCE, AT_ONCE)
    ]
    leaves_s = statistics.median(chain.from_iterable(undisturbed))
    endings: Counter[str] = Counter()

    async def disturbed(number: int) -> None:
        nonlocal leaves_s
        claim = await door.claim()
        call = await door.reserved(claim)
        asking = asyncio.create_task(vllm.complete(prompt(SHORT, number), params=to_params(claim), max_tokens=1))
        await asyncio.wait([asking], timeout=max(0.0, leaves_s + OFFSETS_S[number % len(OFFSETS_S)]))
        await gone(asking)
        event = await asyncio.wait_for(call.read(), PATIENCE_S)
        kind = event.WhichOneof("event")
        endings[kind] += 1
        leaves_s += -STEP_S if kind == "landed" else STEP_S
        await left(call)

    def balanced() -> bool:
        """Often enough, and on both sides of the end."""
        return endings.total() >= times and min(endings["landed"], endings["failed"]) > times / 10

    for number in range(0, 5 * times, AT_ONCE):
        if balanced():
            break
        await asyncio.gather(*map(disturbed, range(number, number + AT_ONCE)))
    assert balanced(), endings
    assert endings.keys() == {"landed", "failed"}


@repeated(10, 50)
async def test_notices_that_come_late_or_never_and_clients_that_do_not_wait_for_them(window: Window, times: int) -> None:
    async with Notices(window.control_port) as notices:
        door = replace(window.door, control_port=notices.port)
        ids = prompt(SHORT)
        expected = await window.vllm.plain(ids)
        assert await handed_over(window.vllm, door, ids) == expected
        for number in range(times):
            claim = await door.claim(wait_ms=9_000)
            call = await door.reserved(claim)
            notices.keep("Sent", "Final", "Abort")
            asking = asyncio.create_task(
                window.vllm.complete(prompt(SHORT, 1_000 + number), params=to_params(claim), max_tokens=1)
            )
            if number % 2:  # in mid-prefill
                await asyncio.wait_for(notices.begun.wait(), PATIENCE_S)
                await gone(asking)
            await asyncio.wait_for(notices.kept.wait(), PATIENCE_S)
            await gone(asking)
            await left(call)
            if number % 10:
                notices.pass_on()  # of a handoff that is over
            else:
                notices.lose()
        await quiet(window.lane)
        assert await handed_over(window.vllm, door, ids) == expected


@repeated(10, 50)
async def test_clients_that_leave_between_the_prefills_answer_and_the_gateways_next_step(window: Window, times: int) -> None:
    """The gateway stands still from the prefills' dispatch on, until their KV has landed, which vLLM's answer comes with."""
    lane = window.lane
    gateway, vllm, log = lane.stack.pid("extproc"), lane.stack.pid("vllm"), window.vllm.log

    async def ask(number: int) -> None:
        body = lane.request(f"Count upwards from {number}.", stream=True, max_tokens=400, ignore_eos=True)
        await lane.client.post("/chat/completions", json=body, headers=LATENCY)

    async def landed() -> bool:
        return await lane.state("landed") + await lane.state("decoding") == AT_ONCE

    async def over() -> bool:
        return await lane.state("free") == await lane.slots()

    for number in range(0, times, AT_ONCE):
        with standing_still(vllm):
            after = taken(log) + AT_ONCE
            asking = [asyncio.create_task(ask(number + one)) for one in range(AT_ONCE)]
            await takes(log, after)
            os.kill(gateway, signal.SIGSTOP)
        try:
            await until(landed, "their KV has landed", PATIENCE_S)
            await asyncio.gather(*map(gone, asking))
        finally:
            os.kill(gateway, signal.SIGCONT)
        await until(over, "every slot is free again", 5)
