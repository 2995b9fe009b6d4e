"""Memory that KV lands in: the host's, or a GPU's. Zeroed when it is made, mapped for as long as somebody holds it."""

import mmap
from typing import Any, Protocol

import structlog
import torch

from handoff.transport import Region

log = structlog.get_logger(__name__)

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every CUDA context of the process


class Buffer(Protocol):
    """`content` (uint8) lies at `region`, which a transport can be told of."""

    content: torch.Tensor
    region: Region

    def forsake(self) -> None:
        """Give back what can be given back without unmapping it; also again, where late writes have taken some of it anew.

        The content is lost.
        """
        ...


def allocate(length: int, device: torch.device) -> Buffer:
    """Return `length` bytes in the memory of `device`.

    A GPU whose memory is full is no reason to be without a landing slot: then they lie in pinned memory, from which they cross
    the bus when they are converted. Raises OSError when the host has no room either.
    """
    if device.type == "cuda":
        try:
            return DeviceBuffer(length, device)
        except torch.OutOfMemoryError as error:
            log.warning("no room on the GPU: KV lands in the host's memory", bytes=length, device=str(device), error=str(error))
    return HostBuffer(length)


class HostBuffer:
    """Pages of this process, pinned where there is a GPU: its copies then run at the bus's speed, and kernels can read them."""

    def __init__(self, length: int) -> None:
        self._pages = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.content = torch.frombuffer(self._pages, dtype=torch.uint8)
        self.content.zero_()  # so that the first handoff does not pay for the pages
        self.region = Region(self.content.data_ptr(), length)
        self._pinned = torch.cuda.is_available() and _pinned(self.region)

    def forsake(self) -> None:
        """See Buffer: the pages go back to the system."""
        if self._pinned:
            _runtime().cudaHostUnregister(self.region.address)
            self._pinned = False
        self._pages.madvise(mmap.MADV_DONTNEED)


class DeviceBuffer:
    """Memory of a GPU. Raises torch.OutOfMemoryError."""

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
