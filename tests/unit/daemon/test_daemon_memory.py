"""Landing memory that is taken from its writers."""

import torch

from tests.kit.handoff import (
    LANDING_BYTES,
    Landing,
)


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
