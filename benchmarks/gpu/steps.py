"""Times of whole steps: queued one behind the other, and as a caller of `greedy` sees them."""

import time
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.ceilings import seconds
from benchmarks.gpu.shapes import SHAPES, random_weights, step_bytes
from decode_daemon.engine.cuda.buckets import bucket_of
from decode_daemon.engine.cuda.model import CudaModel
from decode_daemon.engine.cuda.quantized import WeightsKind

CONTEXTS = (1024, 8192, 32768)
WIDTHS = (1, 4)
_ROOM = 512  # positions behind the longest context for the steps that are timed
_BATCH = 16  # steps between two events
_TOKENS = 128


@dataclass(frozen=True, slots=True)
class StepTime:
    """One width at one context; `greedy_ms` is the time of a token for a caller, width 1 only."""

    model: str
    context: int
    width: int
    ms: float
    greedy_ms: float | None
    step_bytes: int

    @property
    def rate(self) -> float:
        """Bytes per second, of what the step has to read."""
        return self.step_bytes / self.ms * 1e3

    def as_json(self) -> dict[str, Any]:
        """Return it with its rate in GB/s."""
        return asdict(self) | {"gb_per_s": self.rate / 1e9}


def step_times(
    name: str,
    device: torch.device,
    *,
    overlap: bool = True,
    contexts: tuple[int, ...] = CONTEXTS,
    weights_as: WeightsKind = "as-is",
) -> list[StepTime]:
    """Time steps of a shape in bfloat16 with random weights, kept as `weights_as` says, and a random cache."""
    config = SHAPES[name]
    model = CudaModel(
        *(config, random_weights(config, torch.bfloat16, device), max(contexts) + _ROOM),
        device=device,
        widths=WIDTHS,
        overlap=overlap,
        weights_as=weights_as,
    )
    model.cache.normal_()
    return [
        StepTime(
            model=name,
            context=context,
            width=width,
            ms=queued_ms(model, context, width),
            greedy_ms=greedy_ms(model, context) if width == 1 else None,
            step_bytes=step_bytes(config, context, layer_bytes=1 if weights_as == "fp8" else None),
        )
        for context in contexts
        for width in WIDTHS
    ]


def queued_ms(model: CudaModel, context: int, width: int) -> float:
    """Return the median time of a step of `width` rows when the next is queued before it ends."""
    bucket = bucket_of(context, model.buckets)
    ids = torch.arange(1, width + 1)

    def batch() -> None:
        for _ in range(_BATCH):
            model.queue(width, bucket)

    model.forward(ids, context)
    times = []
    for _ in range(3):
        model.feed(ids, context)
        times.append(seconds(batch, repeats=1) / _BATCH * 1e3)
    return median(times)


def greedy_ms(model: CudaModel, context: int) -> float:
    """Return the median over three runs of the wall time of a token from `greedy`."""
    times = []
    for _ in range(3):
        token = model.greedy(1, context) or 0
        begin = time.perf_counter()
        for position in range(context + 1, context + 1 + _TOKENS):
            token = model.greedy(token, position) or 0
        times.append((time.perf_counter() - begin) / _TOKENS * 1e3)
    return median(times)
