"""The daemon that decodes an answer is stopped in mid-stream: the answer goes on elsewhere, and is the one that vLLM gives."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from tests.kit.e2e import Lane, Said, decoding, read_stream
from tests.kit.lane import until

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

PROMPT = "Write a short story about a fox and a river."
SCHEMA = {"type": "object", "properties": {"story": {"type": "string", "maxLength": 250}}, "required": ["story"]}


@dataclass(frozen=True, slots=True)
class Healed:
    """A request, and who goes on with its answer (the label `way` of anchorleg_resumed_total)."""

    fields: dict[str, Any]
    way: str


HEALED = {
    "presence penalty": Healed({"presence_penalty": 1.2}, "daemon"),
    "frequency penalty": Healed({"frequency_penalty": 0.8}, "daemon"),
    "JSON schema": Healed(
        {"response_format": {"type": "json_schema", "json_schema": {"name": "story", "schema": SCHEMA}}}, "daemon"
    ),
    "plain": Healed({}, "vllm"),
}
ALONE = Healed({"presence_penalty": 1.0}, "retold")


def asked(fields: dict[str, Any]) -> dict[str, Any]:
    return {"max_tokens": 60, **fields}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def expected(shared_lane: Lane) -> list[Said]:
    """What plain vLLM says to all of them; asked at once, because it is fast only in batches."""
    requests = [*HEALED.values(), ALONE]
    return await asyncio.gather(*(shared_lane.stream(PROMPT, latency=False, **asked(one.fields)) for one in requests))


@asynccontextmanager
async def stopped(lane: Lane, *daemons: str) -> AsyncIterator[None]:
    """These daemons do nothing within the block; after it they are in the lease table again."""
    for name in daemons:
        os.kill(lane.stack.pid(name), signal.SIGSTOP)
    try:
        yield
    finally:
        for name in daemons:
            os.kill(lane.stack.pid(name), signal.SIGCONT)

        async def back() -> bool:
            return await lane.pool_free() == await lane.slots()

        await until(back, "the daemons are back", 20)


@pytest.mark.parametrize("name", HEALED)
async def test_an_answer_whose_daemon_stops_goes_on_where_it_can_exactly(lane: Lane, expected: list[Said], name: str) -> None:
    healed = HEALED[name]
    before = await lane.metric("extproc", "anchorleg_resumed_total", way=healed.way)
    async with decoding(lane, PROMPT, **asked(healed.fields)) as reading, stopped(lane, await lane.decoding_daemon()):
        assert read_stream(await reading) == expected[list(HEALED).index(name)]
    assert await lane.metric("extproc", "anchorleg_resumed_total", way=healed.way) == before + 1


async def test_an_answer_that_only_a_daemon_can_go_on_with_is_told_again_where_none_is_left(
    lane: Lane, expected: list[Said]
) -> None:
    before = await lane.metric("extproc", "anchorleg_resumed_total", way=ALONE.way)
    async with decoding(lane, PROMPT, **asked(ALONE.fields)) as reading, stopped(lane, *lane.daemons):
        assert read_stream(await reading) == expected[-1]
    assert await lane.metric("extproc", "anchorleg_resumed_total", way=ALONE.way) == before + 1
