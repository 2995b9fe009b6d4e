"""One stack for all tests of this folder, and one more for each way in which vLLM parses answers."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.fidelity.stacks import Running, parsing_stack, reasoning_stack, stack


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    async with stack(tmp_path_factory.mktemp("fidelity")) as started:
        yield started
        await started.quiet()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def parsing(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    async with parsing_stack(tmp_path_factory.mktemp("parsing")) as started:
        yield started
        await started.quiet()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def reasoning(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    async with reasoning_stack(tmp_path_factory.mktemp("reasoning")) as started:
        yield started
        await started.quiet()
