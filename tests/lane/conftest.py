"""One lane for the tests of a module: scripts and records start anew for each test, and no test may leave anything behind."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from benchmarks.fake_daemon import DaemonScript
from benchmarks.fake_vllm import VllmScript
from tests.kit.lane import LaneStack, lane_stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_lane(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LaneStack]:
    async with lane_stack(tmp_path_factory.mktemp("lane")) as stack:
        yield stack


@pytest_asyncio.fixture(loop_scope="module")
async def lane(module_lane: LaneStack) -> AsyncIterator[LaneStack]:
    module_lane.vllm.script, module_lane.daemon.script = VllmScript(), DaemonScript()
    module_lane.vllm.requests.clear()
    module_lane.daemon.requests.clear()
    yield module_lane
    await module_lane.all_free()


@pytest_asyncio.fixture
async def breakable_lane(tmp_path: Path) -> AsyncIterator[LaneStack]:
    """A lane whose ext_proc is a process of its own, for one test to break."""
    async with lane_stack(tmp_path, own_process=True) as stack:
        yield stack
