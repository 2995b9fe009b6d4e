"""`python -m benchmarks.gpu.parallel`: the step that several GPUs compute together, whether it is right and what it takes.

Checks of a small model as for one GPU, on all GPUs together; then each model on one GPU and on all, over the same random cache:
greedy tokens of both, whether the ranks agreed on theirs, and milliseconds a step. Between them, how soon a rank that is killed
is told of. Prints as it goes; the figures as JSON.
"""

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.checks import CASES, Check, check
from benchmarks.gpu.losses import losses
from benchmarks.gpu.shapes import SHAPES, random_weights, step_bytes
from benchmarks.gpu.steps import greedy_ms, queued_ms
from decode_daemon.engine.cuda.model import CudaModel

_CONTEXTS = (1024, 32768)
_ROOM = 512  # positions behind the longest context for the steps that are timed
_TOKENS = 200
_FIRST = 1  # the token that greedy answers begin with
# A bias, a vocabulary that no number of GPUs divides, and KV heads for up to eight.
_SMALL = replace(CASES["llama"], kv_heads=8, qkv_bias=True)
_ERROR = 0.05  # of logits in bfloat16, added in another order, over tens of layers


@dataclass(frozen=True, slots=True)
class Answer:
    """Greedy ids from `_FIRST` on after a random cache of the shortest context, and the logits that each was chosen from."""

    ids: list[int]
    logits: torch.Tensor  # [tokens, vocab]
    unlike: int  # elements of the KV that the greedy steps wrote, unlike that of steps which were told the same ids


@dataclass(frozen=True, slots=True)
class Time:
    """Of a step of one row at one context on `gpus` GPUs: queued one behind the other, and as a caller of `greedy` sees it."""

    model: str
    gpus: int
    context: int
    ms: float
    greedy_ms: float


def main() -> int:
    """Check and time; returns 1 when a check failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.parallel", description=__doc__)
    parser.add_argument("--gpus", type=int, default=2, help="GPUs to compute together (the first ones)")
    parser.add_argument("--models", nargs="*", choices=tuple(SHAPES), default=["8B"])
    parser.add_argument("--no-checks", action="store_true", help="leave the small model out, and the ranks that are killed")
    parser.add_argument("--no-overlap", action="store_true", help="without programmatic dependent launch")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    options = parser.parse_args()
    os.environ.setdefault("NCCL_DEBUG", "WARN")
    device, overlap = torch.device("cuda", 0), not options.no_overlap
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device),
        "gpus": options.gpus,
        "torch": torch.__version__,
        "nccl": torch.cuda.nccl.version(),  # type: ignore[no-untyped-call]
        "checks": [],
        "times": [],
        "starts_s": {},
    }
    began = time.monotonic()
    if not options.no_checks:
        _told(check("small", _SMALL, device, overlap=overlap, ranks=options.gpus), figures)
        _told(losses(_SMALL, options.gpus, overlap=overlap), figures)
        print(f"small model: {time.monotonic() - began:.1f} s", flush=True)
    for name in options.models:
        _compare(name, options.gpus, device, overlap, figures)
        _write(options.json, figures)
    _write(options.json, figures)
    failed = sum(not one["met"] for one in figures["checks"])
    print(f"checks: {len(figures['checks']) - failed} passed, {failed} failed; {time.monotonic() - began:.1f} s in all")
    return 1 if failed else 0


def _compare(name: str, gpus: int, device: torch.device, overlap: bool, figures: dict[str, Any]) -> None:
    """Compute and time the model `name` on one GPU and on `gpus`."""
    config = SHAPES[name]
    weights = random_weights(config, torch.bfloat16, device)
    answers = []
    for ranks in (1, gpus):
        began = time.monotonic()
        model = CudaModel(*(config, weights, max(_CONTEXTS) + _ROOM), device=device, widths=(1,), overlap=overlap, ranks=ranks)
        figures["starts_s"][f"{name} on {ranks}"] = time.monotonic() - began
        try:
            answers.append(_answer(model, device))
            if ranks == gpus:
                _told(_checks(name, *answers), figures)
                figures[f"kv_ms {name}"] = _kv_ms(model)
            for context in _CONTEXTS:
                one = Time(name, ranks, context, queued_ms(model, context, 1), greedy_ms(model, context))
                figures["times"].append(asdict(one))
                rate = step_bytes(config, context) / one.ms * 1e3
                print(f"{one}: {rate / 1e12:.2f} TB/s of weights and KV, all GPUs together", flush=True)
        finally:
            model.close()
        del model
        torch.cuda.empty_cache()


def _answer(model: CudaModel, device: torch.device) -> Answer:
    """Decode greedily, then again in steps that are told their ids: a rank that chose otherwise has written other KV."""
    model.cache.normal_(generator=torch.Generator(device).manual_seed(5))
    start = _CONTEXTS[0]
    ids = [_FIRST]
    for position in range(start, start + _TOKENS):
        best = model.greedy(ids[-1], position)
        if best is None:
            raise SystemExit(f"a logit at position {position} is not finite")
        ids.append(best)
    written = model.cache[:, :, :, start : start + _TOKENS]
    kv = written.clone()
    written.fill_(float("nan"))
    rows = [model.forward(torch.tensor(ids[nth : nth + 1]), start + nth) for nth in range(_TOKENS)]
    again = model.cache[:, :, :, start : start + _TOKENS]
    return Answer(ids[1:], torch.cat(rows), int((kv != again).sum()))


def _checks(name: str, one: Answer, several: Answer) -> list[Check]:
    """Compare the answers of one GPU and of several."""
    parted = next((nth for nth, pair in enumerate(zip(one.ids, several.ids, strict=True)) if len(set(pair)) > 1), _TOKENS)
    same = min(parted + 1, _TOKENS)  # rows that both computed after the same ids
    error = (several.logits[:same].double() - one.logits[:same].double()).norm() / one.logits[:same].double().norm()
    if parted < _TOKENS:
        row = several.logits[parted].double()
        gap, spread = float(row[several.ids[parted]] - row[one.ids[parted]]), float(row.std())
        print(f"{name}: as one GPU for {parted} tokens, then its choice is {gap:.4g} behind (logits' deviation: {spread:.4g})")
    else:
        print(f"{name}: as one GPU for all {_TOKENS} tokens")
    behind = sum(bool(row[chosen] < row.max()) for row, chosen in zip(several.logits, several.ids, strict=True))
    return [
        Check(name, "logits unlike one GPU's, relative error", float(error), _ERROR),
        Check(name, f"KV of {_TOKENS} greedy tokens on which ranks disagree, elements", several.unlike, 0),
        Check(name, "greedy ids that are not forward's largest", behind, 0),
    ]


def _kv_ms(model: CudaModel) -> float:
    """Return the time from a cache of the longest context, on the first GPU, to the first step's result; print it."""
    times = []
    for _ in range(3):
        _ = model.cache
        torch.cuda.synchronize()
        began = time.perf_counter()
        model.bests((_FIRST,), _CONTEXTS[-1])
        times.append((time.perf_counter() - began) * 1e3)
    print(f"KV of {_CONTEXTS[-1]} positions to the other GPUs, and a step: {min(times):.2f} ms", flush=True)
    return min(times)


def _told(checks: list[Check], figures: dict[str, Any]) -> None:
    for one in checks:
        print(f"{'ok    ' if one.met else 'FAILED'} {one.case}: {one.what} {one.value:.4g} (at most {one.limit:.4g})")
        figures["checks"].append(asdict(one) | {"met": one.met})
    sys.stdout.flush()


def _write(path: Path | None, figures: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    sys.exit(main())
