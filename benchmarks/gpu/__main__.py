"""`python -m benchmarks.gpu`: checks, ceilings, steps, and vLLM when its site-packages are given; a table and JSON."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.ceilings import ceilings
from benchmarks.gpu.checks import CASES, FP8_CASES, check
from benchmarks.gpu.shapes import SHAPES, hugging_face
from benchmarks.gpu.steps import CONTEXTS, StepTime, step_times
from decode_daemon.engine.cuda.quantized import WeightsKind

BUS = 4.35e12  # bytes per second that an H200's steps are held against


def main() -> int:
    """Run the parts that were asked for; returns 1 when a check failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--only", nargs="*", choices=("checks", "ceilings", "steps", "vllm"), help="parts, all by default")
    parser.add_argument("--models", nargs="*", choices=tuple(SHAPES), default=list(SHAPES))
    parser.add_argument("--weights", choices=("as-is", "fp8"), default="as-is", help="of the steps; fp8: only its checks")
    parser.add_argument("--vllm-site", type=Path, help="site-packages of a vLLM; without it vLLM is left out")
    parser.add_argument("--no-overlap", action="store_true", help="without programmatic dependent launch")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    options = parser.parse_args()
    device, overlap = torch.device("cuda", 0), not options.no_overlap
    wanted = options.only or ("checks", "ceilings", "steps", "vllm")
    figures: dict[str, Any] = {"device": torch.cuda.get_device_name(device), "torch": torch.__version__}
    failed = _checks(device, overlap, options.weights, figures) if "checks" in wanted else 0
    if "ceilings" in wanted:
        figures["ceilings"] = ceilings(device)
        print(
            "ceilings: " + ", ".join(f"{name} {rate / 1e9:,.0f} GB/s" for name, rate in figures["ceilings"].items()), flush=True
        )
    times: list[StepTime] = []
    for name in options.models if "steps" in wanted else ():
        times += step_times(name, device, overlap=overlap, weights_as=options.weights)
        torch.cuda.empty_cache()
    figures["steps"] = [one.as_json() for one in times]
    _table(times, {}, figures.get("ceilings", {}).get("read"))
    _write(options.json, figures)
    if "vllm" in wanted and options.vllm_site:
        figures["vllm_ms"] = {name: _vllm(name, options.vllm_site) for name in options.models}
        _table(times, figures["vllm_ms"], figures.get("ceilings", {}).get("read"))
    _write(options.json, figures)
    return 1 if failed else 0


def _write(path: Path | None, figures: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(figures, indent=1))


def _checks(device: torch.device, overlap: bool, weights: WeightsKind, figures: dict[str, Any]) -> int:
    """Print every comparison of every case, with fp8 `weights` of theirs only; return how many failed."""
    kinds: tuple[WeightsKind, ...] = ("fp8",) if weights == "fp8" else ("as-is", "fp8")
    done = []
    for kind in kinds:
        for case, config in (FP8_CASES if kind == "fp8" else CASES).items():
            for one in check(case, config, device, overlap=overlap, weights_as=kind):
                print(
                    f"{'ok    ' if one.met else 'FAILED'} {one.case}: {one.what} {one.value:.4g} (at most {one.limit:.4g})",
                    flush=True,
                )
                done.append(one)
    failed = sum(not one.met for one in done)
    figures["checks"] = {"passed": len(done) - failed, "failed": failed}
    print(f"checks: {len(done) - failed} passed, {failed} failed", flush=True)
    return failed


def _vllm(name: str, site: Path) -> dict[str, float]:
    """Return vLLM's milliseconds a token by context; empty, with its last words printed, when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(hugging_face(SHAPES[name])))
        path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"PYTHONPATH": path, "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1"}
        script = Path(__file__).with_name("vllm_steps.py")
        command = [sys.executable, str(script), folder, *map(str, CONTEXTS)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    if line is None:
        print(f"vLLM {name} failed:\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}", flush=True)
        return {}
    found: dict[str, float] = json.loads(line.removeprefix("RESULT "))
    print(f"vLLM {name}: " + ", ".join(f"{context} tokens {ms:.2f} ms" for context, ms in found.items()), flush=True)
    return found


def _table(times: list[StepTime], vllm: dict[str, dict[str, float]], read: float | None) -> None:
    """Print a line for each step time: rates in percent of the bus and of what a plain read was measured at."""
    if not times:
        return
    print("model context width      ms of 4.35 TB/s  of read greedy ms   vLLM  times")
    for one in times:
        rival = vllm.get(one.model, {}).get(str(one.context)) if one.width == 1 else None
        share = f"{one.rate / read:8.1%}" if read else f"{'':8}"
        greedy = f"{one.greedy_ms:9.3f}" if one.greedy_ms else f"{'':9}"
        against = f" {rival:6.2f} {rival / one.greedy_ms:6.2f}" if rival and one.greedy_ms else ""
        print(f"{one.model:5} {one.context:7d} {one.width:5d} {one.ms:7.3f} {one.rate / BUS:12.1%} {share} {greedy}{against}")
    _ratios(times)


def _ratios(times: list[StepTime]) -> None:
    """Print what four rows cost, and what a long context costs beyond the bytes of its KV at the speed of the 1K step."""
    by = {(one.model, one.context, one.width): one for one in times}
    for (model, context, width), one in by.items():
        base = by[model, context, 1]
        if width != 1:
            print(f"{model} at {context}: width {width} over width 1: {one.ms / base.ms:.3f} times")
        short = by[model, min(CONTEXTS), 1]
        if width == 1 and context != short.context:
            extra, kv = one.ms - short.ms, (one.step_bytes - short.step_bytes) / BUS * 1e3
            print(f"{model} at {context}: {extra:.3f} ms over the {short.context} step, its KV bytes explain {kv:.3f} ms")


if __name__ == "__main__":
    sys.exit(main())
