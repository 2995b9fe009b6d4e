import warnings
from collections.abc import AsyncIterator

import pytest

from tests.kit.handoff import Landing, landing

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of vLLM's own making
    import connector  # noqa: F401


@pytest.fixture
async def daemon() -> AsyncIterator[Landing]:
    async with landing() as here:
        yield here
