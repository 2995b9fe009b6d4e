# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"
# The kernel is Triton's language, not Python's: its arguments are pointers that mypy has no types for.
"""What the memory gives: bytes per second of a large copy (read and written) and of a large read."""

from collections.abc import Callable
from statistics import median

import torch
import triton
import triton.language as tl

_BYTES = 8 << 30  # far more than the L2 cache holds
_BLOCK = 16384


@triton.jit
def _read(sums, values, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    tl.store(sums + tl.program_id(0), tl.sum(tl.load(values + at, eviction_policy="evict_first"), axis=0))


def seconds(work: Callable[[], object], repeats: int = 15) -> float:
    """Return the median time of `work` on the device, after three warm-ups."""
    times = []
    for turn in range(repeats + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        if turn >= 3:
            times.append(begin.elapsed_time(end) / 1e3)
    return float(median(times))


def ceilings(device: torch.device) -> dict[str, float]:
    """Return bytes per second of a copy and of a read, on random data."""
    values = torch.randn(_BYTES // 4, device=device)
    target = torch.empty_like(values)
    copy = 2 * _BYTES / seconds(lambda: target.copy_(values))
    programs = values.numel() // _BLOCK
    sums = torch.empty(programs, device=device)
    read = _BYTES / seconds(lambda: _read[(programs,)](sums, values, _BLOCK, num_warps=8))
    return {"copy": copy, "read": read}
