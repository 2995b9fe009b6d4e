"""Where landing memory lies, and what becomes of it."""

import pytest
import torch

from decode_daemon.buffers import DeviceBuffer, HostBuffer, allocate
from decode_daemon.memory import LandingMemory, landing_device
from handoff.transport import Region
from tests.kit.network import Registry

LENGTH = 1 << 16
CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


def test_kv_lands_beside_the_engine_where_the_transport_can_write_there(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", current.append)  # no GPU here
    assert landing_device(GPU, "mooncake") == CPU
    assert landing_device(CPU, "nixl") == CPU
    assert current == []
    assert landing_device(GPU, "nixl") == GPU
    assert current == [GPU]


def test_host_memory_is_zeros_and_forsaken_any_number_of_times_still_mapped() -> None:
    buffer = HostBuffer(LENGTH)
    assert buffer.region == Region(buffer.content.data_ptr(), LENGTH)
    assert not buffer.content.any()
    for _ in range(2):
        buffer.content.fill_(7)
        buffer.forsake()
        assert not buffer.content.any()


def test_a_gpu_without_room_is_replaced_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: DeviceBuffer, length: int, device: torch.device) -> None:
        raise torch.OutOfMemoryError("of 141 GB none is free")

    monkeypatch.setattr(DeviceBuffer, "__init__", full)  # no GPU here, let alone a full one
    memory = LandingMemory(Registry(), LENGTH, GPU)  # type: ignore[arg-type]
    assert memory.view(LENGTH).device == CPU
    memory.renew()
    assert memory.generation == 1


def test_host_memory_is_what_a_cpu_gets() -> None:
    assert isinstance(allocate(LENGTH, CPU), HostBuffer)
