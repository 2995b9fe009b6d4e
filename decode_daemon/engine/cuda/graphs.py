"""Whole steps captured as CUDA graphs; where kernels are interpreted on the CPU, launched anew each time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from decode_daemon.engine.cuda.buckets import Bucket
from decode_daemon.engine.cuda.step import Step


class Replayable(Protocol):
    """A step of one width in one bucket."""

    def replay(self) -> None:
        """Queue it on the current stream."""
        ...


class Event(Protocol):
    """A point on the current stream: CUDA's, or `Computed`."""

    def record(self) -> None:
        """Put it behind what is queued."""
        ...

    def query(self) -> bool:
        """Tell if all before it has been computed."""
        ...


@dataclass(frozen=True, slots=True)
class Launches:
    """A step as its launches."""

    step: Step
    width: int
    bucket: Bucket

    def replay(self) -> None:
        """Compute it."""
        self.step.launch(self.width, self.bucket)


class Computed:
    """Stands for a CUDA event where there is nothing to wait for."""

    def record(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Return True."""
        return True


def captured(step: Step, width: int, bucket: Bucket, wait: Callable[[], None]) -> Replayable:
    """Capture a step of `width` rows in `bucket`; all ranks in the same order. `wait` ends when the device is idle."""
    device = step.state.device
    if device.type == "cpu":
        return Launches(step, width, bucket)
    # A step of no rows leaves nothing behind; it compiles and loads the kernels, which a capture cannot, and has NCCL connect.
    step.launch(width, bucket)
    wait()
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog thread asks for events of its own at any time, which the usual mode takes for a mistake of the capture.
    with torch.cuda.graph(graph, capture_error_mode="global" if step.join is None else "thread_local"):
        step.launch(width, bucket)
    return graph


def tell(step: Step, ids: torch.Tensor, position: int) -> None:
    """Tell the next step its `ids` (int64, up to 8, on the CPU or the step's device) and where the first stands."""
    # From pageable memory: the driver has read it when the call returns, so no buffer of ours can change too early.
    step.ids[: ids.shape[0]].copy_(ids, non_blocking=True)
    step.state.copy_(torch.tensor((position, ids.shape[0]), dtype=torch.int32), non_blocking=True)
