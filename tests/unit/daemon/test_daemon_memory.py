"""Landing memory that is taken from its writers."""

from collections.abc import Sequence

import pytest
import torch

from decode_daemon.memory import LandingMemory
from handoff.transport import Region, TransportError
from tests.kit.handoff import (
    LANDING_BYTES,
    Landing,
)
from tests.kit.network import Registry


class Broken(Registry):
    """Refuses what it is told to."""

    refused = ""

    def register(self, regions: Sequence[Region]) -> None:
        if self.refused == "register":
            raise TransportError("no memory can be pinned")
        super().register(regions)

    def unregister(self, regions: Sequence[Region]) -> None:
        if self.refused == "unregister":
            raise RuntimeError("who is that?")
        super().unregister(regions)


async def test_renewed_memory_is_elsewhere_and_the_old_stays_mapped_without_its_pages(daemon: Landing) -> None:
    memory = daemon.slots[0].memory
    addresses = []
    for generation in range(3):
        assert memory.generation == generation
        view = memory.view(LANDING_BYTES)
        assert not view.any()
        view.fill_(7)
        addresses.append(memory.address)
        old = view
        memory.renew()
        assert not old.any()  # a late write would find zeros there, and leave its bytes to nobody
        old.fill_(9)
    assert len({*addresses, memory.address}) == 4
    assert torch.equal(memory.view(LANDING_BYTES), torch.zeros(LANDING_BYTES, dtype=torch.uint8))


def test_memory_that_cannot_be_renewed_is_as_it_was_and_may_be_renewed_again() -> None:
    registry = Broken()
    memory = LandingMemory(registry, LANDING_BYTES)  # type: ignore[arg-type]
    address = memory.address
    registry.refused = "register"
    with pytest.raises(TransportError, match="pinned"):
        memory.renew()
    assert (memory.address, memory.generation, registry.regions) == (address, 0, [Region(address, LANDING_BYTES)])
    registry.refused = ""
    memory.renew()
    assert memory.address != address
    assert (memory.generation, registry.regions) == (1, [Region(memory.address, LANDING_BYTES)])


def test_memory_is_renewed_also_where_the_old_cannot_be_withdrawn() -> None:
    registry = Broken()
    memory = LandingMemory(registry, LANDING_BYTES)  # type: ignore[arg-type]
    address = memory.address
    registry.refused = "unregister"
    memory.renew()
    assert memory.address != address
    assert memory.generation == 1
