"""Real parts broken in real ways: nothing is lost, nothing is held."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from cli.programs import find_program
from leases import LeasesUnavailable, LeaseTable
from tests.kit.e2e import PROMPTS, Lane, decoding, quiet, read_stream
from tests.kit.lane import LATENCY, until

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

LONG = "Write a long story about a fox. " + "It runs and runs. " * 150


@pytest.mark.parametrize("after", ["at once", "in prefill", "in decode"])
async def test_clients_that_leave_hold_nothing(lane: Lane, after: str) -> None:
    body = lane.request(LONG, stream=True, max_tokens=400, ignore_eos=True)
    for round_ in range(3):
        body["cache_salt"] = f"{after} {round_}"
        started = asyncio.Event()

        async def read(started: asyncio.Event = started) -> None:
            async with lane.client.stream("POST", "/chat/completions", json=body, headers=LATENCY) as response:
                async for text in response.aiter_text():
                    if '"content":"' in text:
                        started.set()

        calls = await lane.metric("extproc", "anchorleg_ext_proc_calls_total")
        reading = asyncio.create_task(read())
        if after == "at once":

            async def called(calls: float = calls) -> bool:
                return await lane.metric("extproc", "anchorleg_ext_proc_calls_total") > calls

            await until(called, "the gateway has the request")
        elif after == "in prefill":

            async def landing() -> bool:
                return await lane.state("landing") == 1

            await until(landing, "a slot is landing")
        elif after == "in decode":
            await asyncio.wait_for(started.wait(), 60)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    await quiet(lane)


async def test_a_daemon_killed_in_mid_stream_costs_no_token(lane: Lane) -> None:
    expected = await lane.stream(PROMPTS[9], latency=False, max_tokens=60)
    async with decoding(lane, PROMPTS[9], max_tokens=60) as reading:
        os.kill(lane.stack.pid(await lane.decoding_daemon()), signal.SIGKILL)
        assert read_stream(await reading) == expected


async def test_redis_killed_and_started_empty_in_mid_stream_costs_nothing(lane: Lane, successor: "Successor") -> None:
    # The lane's own answer when nothing happens: as many tokens would take plain vLLM a minute.
    expected = await lane.stream(LONG, latency=True, max_tokens=450, ignore_eos=True)
    async with decoding(lane, LONG, max_tokens=450, ignore_eos=True) as reading:
        os.kill(lane.stack.pid("redis"), signal.SIGKILL)
        meanwhile = await lane.post(lane.request(PROMPTS[0], max_tokens=4), latency=True, fallback=True)
        assert (meanwhile.status_code, meanwhile.headers["x-slo-reason"]) == (200, "leases_unavailable")
        await successor.start()

        async def whole() -> bool:
            pools = await successor.table.inspect()
            nodes = pools[lane.settings.served_model_name].nodes if pools else ()
            return [slot.state for one in nodes for slot in one.slots if slot.epoch is not None] == ["decoding"]

        await until(whole, "the table has the daemon and its running lease again", 10)
        assert not reading.done()

        async def served() -> bool:
            answer = await lane.post(lane.request(PROMPTS[0], max_tokens=4), latency=True, fallback=True)
            return answer.headers["x-slo-lane"] == "latency"

        await until(served, "the lane serves again", 20)
        assert read_stream(await reading) == expected


class Successor:
    """A valkey in the place of the stack's own, which was killed."""

    def __init__(self, lane: Lane) -> None:
        service = next(s for s in lane.stack.services if s.name == "redis")
        self._command = [*find_program(service.command[0]), *service.command[1:]]
        decode = next(s for s in lane.stack.services if s.name == lane.daemons[0])
        self.table = LeaseTable(decode.command[decode.command.index("--redis-url") + 1])
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(*self._command, stdout=asyncio.subprocess.DEVNULL)
        await until(self._answers, f"an answer of {self._command}")

    async def _answers(self) -> bool:
        try:
            await self.table.inspect()
        except LeasesUnavailable:
            return False
        return True

    async def stop(self) -> None:
        await self.table.aclose()
        if self._process is not None:
            self._process.kill()
            await self._process.wait()


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def successor(shared_lane: Lane) -> AsyncIterator[Successor]:
    """Runs as long as the lane does, since tests of other modules use its table after this one."""
    valkey = Successor(shared_lane)
    yield valkey
    await valkey.stop()
