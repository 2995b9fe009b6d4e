"""Whole handoffs over the transport that the settings name, and a refusal where the two ends name different ones."""

import warnings

import pytest
from pydantic import ValidationError

from decode_daemon.slots import HandoffFailed
from handoff.transports import TransportName, open_transport
from tests.kit.handoff import hand_over, landing, prefill, whole

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of vLLM's own making
    from connector.settings import ConnectorSettings


@pytest.mark.parametrize("name", ["nixl", "mooncake"])
async def test_handoff_after_handoff_lands_byte_for_byte_in_either_slot(name: TransportName) -> None:
    async with landing(network=name) as daemon:
        with prefill(network=open_transport(name, "prefill"), transport=name) as worker:
            for slot in (0, 1, 0):
                await hand_over(worker, daemon, slot=slot)
            assert worker.failed == []


@pytest.mark.parametrize("name", ["nixl", "mooncake"])
async def test_after_a_slots_memory_was_renewed_handoffs_land_in_the_new_one(name: TransportName) -> None:
    async with landing(network=name) as daemon:
        with prefill(network=open_transport(name, "prefill"), transport=name) as worker:
            await hand_over(worker, daemon)
            daemon.slots[0].memory.renew()
            await hand_over(worker, daemon)
            assert worker.failed == []


async def test_a_connector_with_another_transport_is_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    async with landing(network="mooncake") as daemon:
        with prefill(network=open_transport("nixl", "prefill")) as worker:
            claim, held = daemon.claim()
            worker.write(worker.open(claim, 4), [1])
            with pytest.raises(HandoffFailed):
                await whole(held)
    assert "transport differs: the connector has nixl, the daemon has mooncake" in caplog.text


def test_a_transport_that_is_not_there_is_refused_by_the_settings() -> None:
    with pytest.raises(ValidationError, match="'nixl' or 'mooncake'"):
        ConnectorSettings(transport="rdma")
