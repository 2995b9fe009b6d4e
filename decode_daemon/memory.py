"""A landing slot's memory: registered with the transport, and replaceable when its writers cannot be trusted to be gone."""

import torch

from handoff.transport import Region, Transport


class LandingMemory:
    """One contiguous host buffer of `length` bytes."""

    def __init__(self, transport: Transport, length: int) -> None:
        self._transport = transport
        self.length = length
        self.generation = 0  # changes when the buffer does: peers must fetch the transport's metadata again
        self._buffer = self._allocate()

    @property
    def address(self) -> int:
        """Where writers write to."""
        return self._buffer.data_ptr()

    def view(self, length: int) -> torch.Tensor:
        """Return the first `length` bytes, uint8."""
        return self._buffer[:length]

    def renew(self) -> None:
        """Register a new buffer and withdraw the old one: late writes fail instead of landing."""
        old = self._buffer
        self._buffer = self._allocate()
        self.generation += 1
        self._transport.unregister([_region(old)])

    def close(self) -> None:
        """Withdraw the buffer."""
        self._transport.unregister([_region(self._buffer)])

    def _allocate(self) -> torch.Tensor:
        # Touched here, so that the first handoff does not pay for the pages.
        buffer = torch.zeros(self.length, dtype=torch.uint8)
        self._transport.register([_region(buffer)])
        return buffer


def _region(buffer: torch.Tensor) -> Region:
    return Region(buffer.data_ptr(), buffer.numel())
