"""Times the product kernel alone, tile by tile: `python -m benchmarks.gpu.tiles`; its best are engine/cuda/tiles.py's.

Every launch reads another matrix, together far more than the L2 cache holds, one launch overlapping the next as in a step.
"""

import multiprocessing
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.ceilings import seconds
from benchmarks.gpu.shapes import SHAPES
from decode_daemon.engine.cuda.products import SLOTS, product
from decode_daemon.engine.cuda.step import NO_PEAK
from decode_daemon.engine.cuda.tiles import Tile

_WIDTHS = (1, 4)
_BYTES = 1 << 30  # of the matrices that are read in turn
_TILES = [
    Tile(rows, columns, 8, warps)
    for rows in (2, 4, 8)
    for columns, warps in ((2048, 8), (1024, 4), (2048, 4))
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Job:
    """One product of one model."""

    name: str
    inputs: int
    outputs: int
    normed: bool = False
    gated: bool = False
    residual: bool = False
    peaked: bool = False

    @property
    def bytes(self) -> int:
        """Of the matrix, in bfloat16."""
        return 2 * self.inputs * self.outputs * (2 if self.gated else 1)

    def options(self, width: int, tile: Tile) -> dict[str, Any]:
        """Return the kernel's constants."""
        return {
            **{name: getattr(self, name) for name in ("inputs", "outputs", "normed", "gated", "residual", "peaked")},
            **{name: getattr(tile, name) for name in ("rows", "columns", "vector")},
            "width": width,
            "biased": False,
            "slots": SLOTS,
            "overlap": True,
            "num_warps": tile.warps,
            "launch_pdl": True,
        }


def jobs() -> Iterator[Job]:
    """Yield the products of every shape."""
    for name, shape in SHAPES.items():
        dim = shape.head_dim
        yield Job(f"{name} qkv", shape.hidden, (shape.heads + 2 * shape.kv_heads) * dim, normed=True)
        yield Job(f"{name} output", shape.heads * dim, shape.hidden, residual=True)
        yield Job(f"{name} gate, up", shape.hidden, shape.intermediate, normed=True, gated=True)
        yield Job(f"{name} down", shape.intermediate, shape.hidden, residual=True)
        yield Job(f"{name} head", shape.hidden, shape.vocab_size, normed=True, peaked=True)


def compiled(task: tuple[Job, int, Tile]) -> None:
    """Compile one kernel into Triton's cache on disk."""
    job, width, tile = task
    b = torch.bfloat16
    absent = b if job.normed else None, b if job.residual else None, torch.int64 if job.peaked else None  # as `Step` launches
    product.warmup(b, b, b, *absent, 1e-5, grid=(1,), **job.options(width, tile))


def timed(job: Job, width: int, tile: Tile, weights: torch.Tensor, repeats: int = 5) -> float:
    """Return the microseconds of one product among many."""
    device = weights.device
    x, out = (torch.randn(8, size, device=device).bfloat16() for size in (job.inputs, job.outputs))
    gain = torch.ones(job.inputs, dtype=torch.bfloat16, device=device)
    peaks = torch.full((8, SLOTS), NO_PEAK, dtype=torch.int64, device=device)
    absent = gain if job.normed else None, out if job.residual else None, peaks if job.peaked else None
    grid, options = (-(-job.outputs // tile.rows),), job.options(width, tile)
    count = max(4, _BYTES // job.bytes)
    matrices = [weights[n * job.bytes // 2 :] for n in range(count)]

    def launch() -> None:
        for matrix in matrices:
            product[grid](out, x, matrix, *absent, 1e-5, **options)

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return median(seconds(graph.replay, repeats=1) for _ in range(repeats)) / count * 1e6


def main() -> None:
    """Print a line for each product and width: the matrix's time at 4.35 TB/s and each tile's time."""
    found = [job for job in jobs() if not sys.argv[1:] or any(word in job.name for word in sys.argv[1:])]
    tasks = [(job, width, tile) for job in found for width in _WIDTHS for tile in _TILES]
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        pool.map(compiled, tasks, chunksize=1)
    weights = torch.empty(5 << 29, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
    for job in found:
        for width in _WIDTHS:
            times = {tile: timed(job, width, tile, weights) for tile in _TILES}
            best = min(times.values())
            cells = "  ".join(
                f"{'*' if us == best else ' '}{tile.rows}x{tile.columns}/{tile.warps} {us:6.1f}" for tile, us in times.items()
            )
            print(f"{job.name:12} w{width} {job.bytes / 4.35e6:6.1f} us: {cells}", flush=True)


if __name__ == "__main__":
    main()
