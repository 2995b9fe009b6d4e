"""What NIXL's ends tell each other beside NIXL's own word: which memory lies on a GPU."""

from collections.abc import Iterator

import msgspec
import pytest
import torch

from handoff.nixl import NixlTransport
from handoff.transport import Region, TransportError
from tests.kit.handoff import piece, region, written

SIZE = 4096


@pytest.fixture
def ends() -> Iterator[tuple[NixlTransport, NixlTransport]]:
    near, there = NixlTransport("near"), NixlTransport("there", attend=lambda: True)
    yield near, there
    near.close()
    there.close()


def test_memory_of_the_host_is_written_to_as_such_and_what_is_said_to_be_a_gpus_is_not(
    ends: tuple[NixlTransport, NixlTransport],
) -> None:
    near, there = ends
    source, target = torch.full((SIZE,), 7, dtype=torch.uint8), torch.zeros(SIZE, dtype=torch.uint8)
    near.register([region(source)])
    there.register([region(target)])
    told = msgspec.msgpack.decode(there.metadata())
    assert told["on_gpus"] == []
    written(near, near.connect(there.metadata()), [piece(source, target.data_ptr())], source)
    assert torch.equal(source, target)
    # There is no GPU here: that NIXL finds no such memory shows what it was asked for.
    told["on_gpus"] = [{"address": target.data_ptr(), "length": SIZE, "device": 0}]
    with pytest.raises(TransportError, match="cannot write"):
        written(near, near.connect(msgspec.msgpack.encode(told)), [piece(source, target.data_ptr() + 1, length=9)], source)


MANY = msgspec.msgpack.encode({"agent": b"", "on_gpus": 257 * (Region(0, 1, 0),)})


@pytest.mark.parametrize("metadata", [b"", b"nixl", msgspec.msgpack.encode({"agent": b"", "on_gpus": 3}), MANY])
def test_what_no_end_of_ours_tells_is_refused(ends: tuple[NixlTransport, NixlTransport], metadata: bytes) -> None:
    with pytest.raises(TransportError, match="cannot connect"):
        ends[0].connect(metadata)


def test_a_region_on_a_gpu_survives_the_telling() -> None:
    there = Region(1 << 40, SIZE, 3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode((there,)), type=tuple[Region, ...]) == (there,)


def test_memory_of_a_gpu_that_is_not_there_is_refused_by_its_number(ends: tuple[NixlTransport, NixlTransport]) -> None:
    with pytest.raises(TransportError, match="GPU 9999"):
        ends[0].register([Region(1 << 40, SIZE, 9999)])
