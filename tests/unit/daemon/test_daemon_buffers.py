"""Where landing memory lies, and what becomes of it."""

import mmap

import pytest
import torch

from decode_daemon.buffers import HOST, DeviceBuffer, HostBuffer, Place, allocate
from decode_daemon.memory import LandingMemory, landing_place
from handoff.transport import Region
from tests.kit.network import Registry

LENGTH = 1 << 16
CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What a GPU would be asked for, as there is none here; its free bytes, to be changed."""
    free = [64 << 30]

    def on_gpu(self: DeviceBuffer, length: int, device: torch.device) -> None:
        pages = mmap.mmap(-1, length)
        self.content = torch.frombuffer(pages, dtype=torch.uint8)
        self.region = Region(self.content.data_ptr(), length, device.index)

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 141 << 30))
    monkeypatch.setattr(DeviceBuffer, "__init__", on_gpu)
    monkeypatch.setattr("decode_daemon.buffers._pinned", lambda region: False)
    return free


def test_kv_lands_beside_the_engine_where_the_transport_can_write_there(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", current.append)  # no GPU here
    assert landing_place(CPU, "nixl") == landing_place(CPU, "mooncake") == HOST
    assert current == []
    assert landing_place(GPU, "mooncake") == Place(CPU, pinned=True)
    assert landing_place(GPU, "nixl") == Place(GPU, pinned=True)
    assert current == [GPU, GPU]


def test_an_engine_without_a_gpu_pins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> None:
        raise AssertionError("the CUDA runtime was asked")

    monkeypatch.setattr("decode_daemon.buffers._runtime", asked)
    buffer = allocate(LENGTH, HOST)
    buffer.forsake()


def test_host_memory_is_zeros_and_forsaken_any_number_of_times_still_mapped() -> None:
    buffer = HostBuffer(LENGTH)
    assert buffer.region == Region(buffer.content.data_ptr(), LENGTH)
    assert not buffer.content.any()
    for _ in range(2):
        buffer.content.fill_(7)
        buffer.forsake()
        assert not buffer.content.any()


def test_a_gpu_without_room_for_the_engine_beside_it_is_replaced_by_the_host(gpu: list[int]) -> None:
    gpu[0] = LENGTH + (1 << 30)
    memory = LandingMemory(Registry(), LENGTH, Place(GPU, pinned=True))  # type: ignore[arg-type]
    assert memory.region.device is None
    memory.renew()
    assert memory.generation == 1


@pytest.mark.usefixtures("gpu")
def test_a_slot_whose_memory_on_a_gpu_is_given_up_takes_no_more_of_it() -> None:
    memory = LandingMemory(Registry(), LENGTH, Place(GPU, pinned=True))  # type: ignore[arg-type]
    assert memory.region.device == 0
    for _ in range(3):
        memory.renew()
        assert memory.region.device is None


def test_host_memory_is_what_a_cpu_gets() -> None:
    assert isinstance(allocate(LENGTH, HOST), HostBuffer)
