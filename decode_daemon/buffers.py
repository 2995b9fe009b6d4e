"""Memory that KV lands in: the host's, or a GPU's. Zeroed when it is made, mapped for as long as somebody holds it."""

import mmap
from dataclasses import dataclass
from typing import Any, Protocol

import structlog
import torch

from handoff.transport import Region

log = structlog.get_logger(__name__)

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every CUDA context of the process
_RESERVE = 2 << 30  # of a GPU's memory, for what an engine allocates while it decodes


@dataclass(frozen=True, slots=True)
class Place:
    """Where a buffer shall lie. `pinned`: in host memory that the engine's GPU reads, or would read if its own had no room."""

    device: torch.device
    pinned: bool

    def on_the_host(self) -> "Place":
        """Return the next best place of a GPU."""
        return Place(HOST.device, self.pinned)


HOST = Place(torch.device("cpu"), pinned=False)


class Buffer(Protocol):
    """`content` (uint8) lies at `region`, which a transport can be told of."""

    content: torch.Tensor
    region: Region

    def forsake(self) -> None:
        """Give back what can be given back without unmapping it; also again, where late writes have taken some of it anew.

        The content is lost.
        """
        ...


def allocate(length: int, place: Place) -> Buffer:
    """Return `length` bytes at `place`.

    A GPU with too little room is no reason to be without a landing slot: then they lie in pinned memory, from which they cross
    the bus when they are converted. Raises OSError when the host has no room either.
    """
    if place.device.type == "cuda":
        # What PyTorch has cached counts as taken here: it is the engine's.
        free, _ = torch.cuda.mem_get_info(place.device)
        if free >= length + _RESERVE:
            return DeviceBuffer(length, place.device)
        log.warning("little room on the GPU: KV lands in the host's memory", bytes=length, free=free, reserve=_RESERVE)
    return HostBuffer(length, pinned=place.pinned)


class HostBuffer:
    """Pages of this process. Pinned, a GPU's copies of them run at the bus's speed, and its kernels can read them."""

    def __init__(self, length: int, *, pinned: bool = False) -> None:
        self._pages = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.content = torch.frombuffer(self._pages, dtype=torch.uint8)
        self.content.zero_()  # so that the first handoff does not pay for the pages
        self.region = Region(self.content.data_ptr(), length)
        self._pinned = pinned and _pinned(self.region)

    def forsake(self) -> None:
        """See Buffer: the pages go back to the system."""
        if self._pinned:
            error = int(_runtime().cudaHostUnregister(self.region.address))
            if error:
                log.warning("landing memory stays pinned: its pages are kept", cuda_error=error)
            self._pinned = False
        self._pages.madvise(mmap.MADV_DONTNEED)


class DeviceBuffer:
    """Memory of a GPU."""

    def __init__(self, length: int, device: torch.device) -> None:
        self.content = torch.zeros(length, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)  # a peer's writes are on no stream of ours: the zeros must be there before them
        self.region = Region(self.content.data_ptr(), length, self.content.device.index)

    def forsake(self) -> None:
        """See Buffer: of a GPU's memory nothing can be given back while a peer may have it mapped."""


def _pinned(region: Region) -> bool:
    error = int(_runtime().cudaHostRegister(region.address, region.length, _PORTABLE))
    if error:
        log.warning("landing memory is not pinned: it is copied before it is converted", bytes=region.length, cuda_error=error)
    return not error


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
