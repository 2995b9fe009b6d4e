"""Measures other ways to compute a step against the default: `python -m benchmarks.gpu.variants`; its checks come first.

For each product: today's, `prepared_product` and `tensor_product` with several tiles, alone, at widths 1, 4 and 8. For
attention: warps, stages, tiles and splits, alone, at three contexts. Then whole steps of each, and what a caller waits for a
token with speculation on and off. What a part takes is printed as it is known, and the JSON is written anew each time.
"""

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.ceilings import seconds
from benchmarks.gpu.checks import CASES
from benchmarks.gpu.shapes import SHAPES, random_weights
from benchmarks.gpu.steps import queued_ms
from benchmarks.gpu.tiles import Job, compiled, jobs, timed
from benchmarks.gpu.variant_checks import check_prepared
from decode_daemon.engine.cuda.buckets import bucket_of
from decode_daemon.engine.cuda.model import CudaModel
from decode_daemon.engine.cuda.plan import Attention, Plan, Products
from decode_daemon.engine.cuda.prepared import prepared_product
from decode_daemon.engine.cuda.products import SLOTS
from decode_daemon.engine.cuda.step import NO_PEAK, Step
from decode_daemon.engine.cuda.tensor import tensor_product
from decode_daemon.engine.cuda.tiles import PreparedTile, Tile, prepared_tile_for, tensor_tile_for, tile_for
from decode_daemon.engine.loop import LlamaEngine
from decode_daemon.engine.policy import Policy, WidthCosts
from decode_daemon.engine.protocol import DecodeParams, SamplingParams
from decode_daemon.engine.speculation import Speculation

Tiles = dict[tuple[int, int], PreparedTile]  # by the matrix's inputs and rows

_WIDTHS = (1, 4, 8)
_CONTEXTS = (1024, 8192, 32768)
_BYTES = 1 << 30
_KERNELS: dict[Products, Any] = {"prepared": prepared_product, "tensor": tensor_product}
_SETTLED = 40  # tokens after which steps are queued ahead where no draft comes
_ATTENTIONS = [
    Attention(),
    Attention(warps=4),
    Attention(programs=1024, most_splits=128),
    Attention(warps=4, programs=1024, most_splits=128),
    Attention(warps=4, programs=2048, most_splits=256),
    Attention(warps=4, tile_elements=4096, programs=1024, most_splits=128),
    Attention(warps=4, stages=3, tile_elements=4096, programs=1024, most_splits=128),
]


def main() -> int:
    """Run all parts; returns 1, after the checks, when one failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.variants", description=__doc__)
    parser.add_argument("--models", nargs="*", choices=tuple(SHAPES), default=list(SHAPES))
    parser.add_argument("--seconds", type=float, default=230.0, help="no part begins later than this")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    options = parser.parse_args()
    began = time.monotonic()
    figures: dict[str, Any] = {"device": torch.cuda.get_device_name()}

    def note(name: str, figure: Any) -> None:
        figures[name] = figure
        if options.json:
            options.json.write_text(json.dumps(figures, indent=1))
        print(f"-- {name}: done after {time.monotonic() - began:.0f} s", flush=True)

    found = [job for job in jobs() if job.name.split()[0] in options.models]
    tasks = [(job, width, tile, kind) for kind in _KERNELS for job in found for width in _WIDTHS for tile in _tiles(job, kind)]
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        checking = pool.map_async(check_prepared, CASES, chunksize=1)
        usual = [(job, width, _tile(job, width)) for job in found for width in _WIDTHS]
        compiling = pool.map_async(compiled, usual, chunksize=1)
        pool.map(_compiled, tasks, chunksize=1)
        compiling.get()
        checks = [one for some in checking.get() for one in some]
    print("\n".join(f"{'ok    ' if met else 'FAILED'} {what}" for what, met in checks), flush=True)
    note("checks", checks)
    if not all(met for _, met in checks):
        return 1
    best = _products(found, note)
    attentions: dict[str, Attention] = {}
    for name in options.models:
        attentions[name] = _attention(name, note)
    for name in options.models:
        # Where programs of the usual tiles all fit the GPU at once, they may crowd on some multiprocessors; so many cannot.
        many = dict(_wider(job) for job in found if job.name.startswith(name))
        plans = {
            "default": Plan(),
            "prepared": Plan("prepared"),
            "tensor": Plan("tensor"),
            "prepared, best tiles": Plan("prepared", best["prepared", name]),
            "tensor, best tiles": Plan("tensor", best["tensor", name]),
            "prepared, four warps": Plan("prepared", many),
            "best attention": Plan(attention=attentions[name]),
        }
        for label, plan in plans.items():
            if time.monotonic() - began < options.seconds:
                note(f"step {name} {label}", _steps(name, label, plan))
    return 0


def _tile(job: Job, width: int) -> Tile:
    """Return what `product` takes at once."""
    return tile_for(job.inputs, job.outputs, width, gated=job.gated, residual=job.residual)


def _tiles(job: Job, kind: Products) -> list[PreparedTile]:
    """Return the tiles to compare, the usual one first."""
    if kind == "tensor":
        usual = tensor_tile_for(job.inputs, job.outputs, gated=job.gated)
        shapes = [(groups, columns, depth) for groups in (1, 2, 4) for columns, depth in ((128, 2), (64, 2), (128, 1))]
        some = [PreparedTile(16, groups, columns, depth, groups) for groups, columns, depth in shapes]
    else:
        usual = prepared_tile_for(job.inputs, job.outputs, gated=job.gated)
        some = [
            PreparedTile(rows, 1, 256 * warps, depth, warps)
            for rows, depth in ((usual.rows, 2), (usual.rows, 1), (2 * usual.rows, 1))
            for warps in (1, 2, 4)
        ]
    return [usual, *(tile for tile in some if tile != usual)]


def _wider(job: Job) -> tuple[tuple[int, int], PreparedTile]:
    """Return the matrix's shape, and the usual tile with four warps in place of two."""
    tile = prepared_tile_for(job.inputs, job.outputs, gated=job.gated)
    if tile.warps == 2:
        tile = replace(tile, columns=2 * tile.columns, warps=4)
    return _matrix(job), tile


def _matrix(job: Job) -> tuple[int, int]:
    return job.inputs, job.outputs * (2 if job.gated else 1)


def _options(job: Job, width: int, tile: PreparedTile) -> dict[str, Any]:
    names = ("inputs", "outputs", "normed", "gated", "residual", "peaked")
    parts = {"rows": tile.rows, "groups": tile.groups, "columns": tile.columns, "depth": tile.depth}
    return {
        **{name: getattr(job, name) for name in names},
        **parts,
        "width": width,
        "biased": False,
        "slots": SLOTS,
        "overlap": True,
        "num_warps": tile.warps,
        "launch_pdl": True,
    }


def _x_dtype(job: Job, kind: Products) -> torch.dtype:
    return torch.bfloat16 if kind == "tensor" or "down" in job.name else torch.float32  # as `Step` allocates them


def _compiled(task: tuple[Job, int, PreparedTile, Products]) -> None:
    """Compile one kernel into Triton's cache on disk, as `Step` launches it."""
    job, width, tile, kind = task
    b, i, x = torch.bfloat16, torch.int64, _x_dtype(job, kind)
    scaled = torch.bfloat16 if kind == "tensor" else torch.float32
    kinds = (b, x, b, b if job.residual else None, i if job.normed else None, b if job.residual else None, scaled)
    absent = i if job.residual else None, i if job.peaked else None
    _KERNELS[kind].warmup(*kinds, *absent, 1e-5, grid=(1,), **_options(job, width, tile))


def _products(found: list[Job], note: Callable[[str, Any], None]) -> dict[tuple[Products, str], Tiles]:
    """Time every product; return for each kind and model the best tiles: the least sum of the times of width 1 and width 4."""
    weights = torch.empty(5 << 29, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
    best: dict[tuple[Products, str], Tiles] = {}
    figures: dict[str, Any] = {}
    for job in found:
        default = {width: timed(job, width, _tile(job, width), weights) for width in _WIDTHS}
        print(
            f"{job.name:12} {job.bytes / 4.35e6:6.1f} us: today " + " / ".join(f"{us:.1f}" for us in default.values()),
            flush=True,
        )
        figures[job.name] = {"default": default}
        for kind in _KERNELS:
            times = {one: {width: _timed(job, width, one, kind, weights) for width in _WIDTHS} for one in _tiles(job, kind)}
            chosen = min(times, key=lambda one: times[one][1] + times[one][4])
            best.setdefault((kind, job.name.split()[0]), {})[_matrix(job)] = chosen
            for one, by in times.items():
                mark = "*" if one == chosen else " "
                label = f"{kind} {one.rows} rows, {one.groups} x {one.columns} columns, {one.warps} warps, depth {one.depth}"
                print(f"   {mark} {label:62}" + " / ".join(f"{by[width]:.1f}" for width in _WIDTHS), flush=True)
            figures[job.name][kind] = [{**asdict(one), "us": by} for one, by in times.items()]
    note("products", figures)
    return best


def _timed(job: Job, width: int, tile: PreparedTile, kind: Products, weights: torch.Tensor) -> float:
    """Return the microseconds of one such product among many."""
    x = torch.randn(8, job.inputs, device="cuda").to(_x_dtype(job, kind))
    out = torch.randn(8, job.outputs, device="cuda").bfloat16()
    gain = torch.ones(job.outputs, dtype=torch.bfloat16, device="cuda")
    scaled = torch.zeros(8, job.outputs, device="cuda", dtype=torch.bfloat16 if kind == "tensor" else torch.float32)
    squares = torch.full((2, 8), 1 << 40, dtype=torch.int64, device="cuda")
    peaks = torch.full((8, SLOTS), NO_PEAK, dtype=torch.int64, device="cuda")
    count, stride = max(4, _BYTES // job.bytes), job.bytes // 2
    optional = (gain, scaled, squares[1]) if job.residual else (None, scaled, None)
    own = tile.rows // (2 if job.gated else 1) if kind == "tensor" else tile.rows * tile.groups

    def launch() -> None:
        for nth in range(count):
            _KERNELS[kind][(-(-job.outputs // own),)](
                *(out, x, weights[nth * stride :], out if job.residual else None, squares[0] if job.normed else None),
                *(*optional, peaks if job.peaked else None, 1e-5),
                **_options(job, width, tile),
            )

    return _graph_seconds(launch) / count * 1e6


def _graph_seconds(launch: Callable[[], None], repeats: int = 5) -> float:
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return median(seconds(graph.replay, repeats=1) for _ in range(repeats))


def _attention(name: str, note: Callable[[str, Any], None]) -> Attention:
    """Time attention and its join in every layer; return the least sum over the contexts at width 1."""
    config = replace(SHAPES[name], hidden=256, intermediate=256, vocab_size=1024)
    weights = random_weights(config, torch.bfloat16, torch.device("cuda"))
    times: dict[Attention, dict[str, float]] = {}
    for plan in _ATTENTIONS:
        found = plan.buckets(max(_CONTEXTS) + 512, config.kv_heads, config.head_dim)
        step = Step(config, weights, max(_CONTEXTS) + 512, found[-1].splits, overlap=True, plan=Plan(attention=plan))
        step.cache.normal_()
        step._qkv.normal_()
        times[plan] = {}
        for context in _CONTEXTS:
            for width in (1, 4):
                step.state.copy_(torch.tensor((context, width)))
                bucket = bucket_of(context, found)

                def launch(step: Step = step, width: int = width, bucket: Any = bucket) -> None:
                    for layer, cache in zip(weights.layers, step.cache, strict=True):
                        step.attend(width, layer, cache, bucket)

                times[plan][f"{context} w{width}"] = _graph_seconds(launch) / config.layers * 1e6
        label = f"{plan.warps} warps, {plan.stages} stages, tile {found[0].tile}, up to {plan.most_splits} splits"
        cells = "  ".join(f"{key} {us:.1f}" for key, us in times[plan].items())
        print(f"{name} attention, us a layer: {label:48} {cells}", flush=True)
        del step
        torch.cuda.empty_cache()
    note(f"attention {name}", [{**asdict(plan), "us": by} for plan, by in times.items()])
    return min(times, key=lambda plan: sum(times[plan][f"{context} w1"] for context in _CONTEXTS))


def _steps(name: str, label: str, plan: Plan) -> dict[str, float]:
    """Time whole steps of a plan."""
    device = torch.device("cuda")
    config = SHAPES[name]
    model = CudaModel(
        config, random_weights(config, torch.bfloat16, device), max(_CONTEXTS) + 512, device=device, widths=_WIDTHS, plan=plan
    )
    model.cache.normal_()
    times = {f"{context} w{width}": queued_ms(model, context, width) for context in _CONTEXTS for width in _WIDTHS}
    one, four = times["1024 w1"], times["1024 w4"]
    print(f"{name} {label}: " + "  ".join(f"{key} {ms:.3f}" for key, ms in times.items()) + " ms")
    print(f"{name} {label}: width 4 over 1 {four / one:.3f}, 32K over 1K {times['32768 w1'] - one:.3f} ms", flush=True)
    if plan == Plan():
        answering = _answering(model)
        print(f"{name}, a token for a caller: " + "  ".join(f"{key} {ms:.3f} ms" for key, ms in answering.items()), flush=True)
        times |= answering
    del model
    torch.cuda.empty_cache()
    return times


def _answering(model: CudaModel, tokens: int = 200) -> dict[str, float]:
    """Return the milliseconds of a token for a caller at 1K: without speculation, with it and never a draft, and row by row."""
    position = _CONTEXTS[0]
    times = {}
    silent = Speculation(model, [], Policy(WidthCosts([1.0] * model.widest)))
    params = DecodeParams(SamplingParams(0.0), tokens + 1, frozenset())
    for label, speculation in (("off", None), ("on, no draft", silent)):
        engine = LlamaEngine(model, speculation)
        runs = []
        for _ in range(3):
            arrived = [time.perf_counter() for _ in engine.decode([1] * position, 1, params, lambda: False)]
            runs.append((arrived[-1] - arrived[_SETTLED]) / (len(arrived) - 1 - _SETTLED) * 1e3)
        times[label] = median(runs)
    token, begin = 1, time.perf_counter()
    for nth in range(tokens):
        token = model.bests([token], position + nth)[0] or 0
    return times | {"never ahead": (time.perf_counter() - begin) / tokens * 1e3}


if __name__ == "__main__":
    sys.exit(main())
