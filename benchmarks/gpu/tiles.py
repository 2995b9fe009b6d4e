"""Times Triton's product alone, tile by tile: `python -m benchmarks.gpu.tiles`; its best are engine/cuda/tiles.py's.

With --fp8 weights are e4m3. Words name products, such as 8B or down.

Every launch reads another matrix, together far more than the L2 cache holds, one launch overlapping the next as in a step.
"""

import multiprocessing
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.ceilings import seconds
from benchmarks.gpu.shapes import SHAPES
from decode_daemon.engine.cuda.products import SLOTS, product
from decode_daemon.engine.cuda.step import NO_PEAK
from decode_daemon.engine.cuda.tiles import Tile, tile_for

_WIDTHS = (1, 4, 8)
_BYTES = 1 << 30  # of the matrices that are read in turn


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
    element_bytes: int = 2

    @property
    def bytes(self) -> int:
        """Of the matrix."""
        return self.element_bytes * self.inputs * self.outputs * (2 if self.gated else 1)

    def options(self, width: int, tile: Tile) -> dict[str, Any]:
        """Return the kernel's constants."""
        return {
            **{name: getattr(self, name) for name in ("inputs", "outputs", "normed", "gated", "residual", "peaked")},
            **{name: getattr(tile, name) for name in ("rows", "columns", "depth")},
            "width": width,
            "biased": False,
            "slots": SLOTS,
            "overlap": True,
            "num_warps": tile.warps,
            "launch_pdl": True,
        }

    @property
    def x_dtype(self) -> torch.dtype:
        """Of the rows, as `Step` allocates them for Triton's products."""
        return torch.bfloat16 if "down" in self.name else torch.float32


def jobs(element_bytes: int) -> Iterator[Job]:
    """Yield the products of every shape, those of the layers only with one byte a weight."""
    for job in _jobs():
        if element_bytes == 2 or "head" not in job.name:
            yield replace(job, element_bytes=element_bytes)


def _jobs() -> Iterator[Job]:
    for name, shape in SHAPES.items():
        dim = shape.head_dim
        yield Job(f"{name} qkv", shape.hidden, (shape.heads + 2 * shape.kv_heads) * dim, normed=True)
        yield Job(f"{name} output", shape.heads * dim, shape.hidden, residual=True)
        yield Job(f"{name} gate, up", shape.hidden, shape.intermediate, normed=True, gated=True)
        yield Job(f"{name} down", shape.intermediate, shape.hidden, residual=True)
        yield Job(f"{name} head", shape.hidden, shape.vocab_size, normed=True, peaked=True)


def tiles(job: Job) -> list[Tile]:
    """Return the tiles to compare, the usual one first."""
    usual = tile_for(job.inputs, job.outputs, gated=job.gated, element_bytes=job.element_bytes)
    line = 512 // job.element_bytes  # columns of one warp
    shapes = [(rows, depth) for rows in (usual.rows, 2 * usual.rows) for depth in (1, 2)]
    some = [Tile(rows, line * warps, depth, warps) for rows, depth in shapes for warps in (1, 2, 4, 8)]
    return [usual, *(tile for tile in some if tile != usual)]


def compiled(task: tuple[Job, int, Tile]) -> None:
    """Compile one kernel into Triton's cache on disk, as `Step` launches it."""
    job, width, tile = task
    b, i = torch.bfloat16, torch.int64
    residual = (b, torch.float32, i) if job.residual else (None, torch.float32, None)
    weight, factors = (b, None) if job.element_bytes == 2 else (torch.float8_e4m3fn, torch.float32)
    kinds = (
        b,
        job.x_dtype,
        weight,
        b if job.residual else None,
        i if job.normed else None,
        *residual,
        i if job.peaked else None,
    )
    product.warmup(*kinds, 1e-5, grid=(1,), factors=factors, **job.options(width, tile))


def timed(job: Job, width: int, tile: Tile, weights: torch.Tensor, repeats: int = 5) -> float:
    """Return the microseconds of one product among many."""
    device = weights.device
    x = torch.randn(8, job.inputs, device=device).to(job.x_dtype)
    out = torch.randn(8, job.outputs, device=device).bfloat16()
    gain = torch.ones(job.outputs, dtype=torch.bfloat16, device=device)
    scaled = torch.zeros(8, job.outputs, device=device)
    squares = torch.full((2, 8), 1 << 40, dtype=torch.int64, device=device)
    peaks = torch.full((8, SLOTS), NO_PEAK, dtype=torch.int64, device=device)
    residual = (gain, scaled, squares[1]) if job.residual else (None, scaled, None)
    rest = out if job.residual else None, squares[0] if job.normed else None, *residual, peaks if job.peaked else None
    grid, options = (-(-job.outputs // tile.rows),), job.options(width, tile)
    count = max(4, _BYTES // job.bytes)
    matrices = [weights[n * job.bytes // 2 :] for n in range(count)]
    factors = None
    if job.element_bytes == 1:  # random bits, some of them no number, which costs the same
        matrices = [matrix.view(torch.float8_e4m3fn) for matrix in matrices]
        factors = torch.ones(job.outputs * (2 if job.gated else 1), device=device)

    def launch() -> None:
        for matrix in matrices:
            product[grid](out, x, matrix, *rest, 1e-5, factors=factors, **options)

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return median(seconds(graph.replay, repeats=1) for _ in range(repeats)) / count * 1e6


def main() -> None:
    """Print for each product the matrix's time at 4.35 TB/s and, tile by tile, its times at every width."""
    words = [word for word in sys.argv[1:] if word != "--fp8"]
    found = [job for job in jobs(1 if "--fp8" in sys.argv else 2) if not words or any(word in job.name for word in words)]
    tasks = [(job, width, tile) for job in found for width in _WIDTHS for tile in tiles(job)]
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        pool.map(compiled, tasks, chunksize=1)
    weights = torch.empty(5 << 29, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
    for job in found:
        print(f"{job.name}: {job.bytes / 4.35e6:.1f} us at 4.35 TB/s; at widths " + ", ".join(map(str, _WIDTHS)), flush=True)
        for nth, tile in enumerate(tiles(job)):
            times = " / ".join(f"{timed(job, width, tile, weights):.1f}" for width in _WIDTHS)
            shape = f"{tile.rows} rows, {tile.columns} columns, {tile.warps} warps, depth {tile.depth}"
            print(f"  {'' if nth else 'usual: '}{shape}: {times}", flush=True)


if __name__ == "__main__":
    main()
