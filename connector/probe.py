"""Find out how an attention backend orders a block's elements, by watching where it puts known ones.

The order depends on the backend, its version and the CPU's instruction set (AMX packs keys for its tiles), so a table would
be wrong one day and wrong text would be the symptom. The probe writes numbered keys and values through the backend's own cache
update into a scratch cache and reads where each went.
"""

from collections.abc import Callable
from typing import Any

import torch

from handoff.layout import AXES, DTYPE_BYTES, BlockLayout, Digit, KindLayout, LayoutError

_BASE = 256  # every integer below it is exact in bfloat16, float16 and float32

CacheUpdate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""key, value ([tokens, kv_heads, head_dim]), cache, slot mapping ([tokens])."""


def backend_update(layer: Any) -> CacheUpdate:
    """Return the cache update of a vLLM attention layer; raises LayoutError if its backend has none of its own."""
    update = getattr(layer.impl, "do_kv_cache_update", None)
    if update is None:
        raise LayoutError(f"attention backend {type(layer.impl).__name__} has no separate cache update to probe")

    def run(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        update(layer, key, value, cache, slots)

    return run


def probe_block(update: CacheUpdate, cache: torch.Tensor, *, kv_heads: int, head_dim: int, block_tokens: int) -> BlockLayout:
    """Describe the interior of one block of `cache` (first axis: blocks).

    Raises LayoutError, naming what is wrong, for a cache whose blocks are not contiguous, whose dtype is not handed over, or
    whose order is not a strided one.
    """
    dtype = str(cache.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise LayoutError(f"KV cache dtype {dtype} is not handed over (one of {', '.join(DTYPE_BYTES)} is)")
    shape = (2, kv_heads, block_tokens, head_dim)
    elements = 2 * kv_heads * block_tokens * head_dim
    if cache[0].numel() != elements or cache.stride(0) != elements:
        raise LayoutError(
            f"a block of shape {tuple(cache.shape[1:])}, {cache.stride(0)} elements apart, does not hold {shape} contiguously"
        )
    keys, values = _positions(update, cache, elements, shape)
    layout = BlockLayout(
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_tokens=block_tokens,
        dtype=dtype,
        keys=_kind(keys, "key"),
        values=_kind(values, "value"),
    )
    layout.validate()
    return layout


def _positions(update: CacheUpdate, cache: torch.Tensor, elements: int, shape: tuple[int, int, int, int]) -> torch.Tensor:
    """Return, for each [kind, head, token, dim], the element's place in its block."""
    numbers = torch.arange(elements).reshape(shape)
    found = torch.zeros(elements, dtype=torch.int64)
    scale = 1
    while scale < elements:
        digit = (numbers // scale % _BASE).to(cache.dtype).to(cache.device)
        # Two blocks, written to the second, so that a backend's use of the slot mapping is probed too.
        scratch = torch.empty_strided((2, *cache.shape[1:]), cache.stride(), dtype=cache.dtype, device=cache.device)
        scratch.zero_()
        slots = torch.arange(shape[2], 2 * shape[2], dtype=torch.int64, device=cache.device)
        keys, values = (kind.transpose(0, 1).contiguous() for kind in digit)
        update(keys, values, scratch, slots)
        written = scratch.as_strided((elements,), (1,), elements)
        found += written.cpu().to(torch.float32).to(torch.int64) * scale
        scale *= _BASE
    if not torch.equal(found.sort().values, torch.arange(elements)):
        raise LayoutError("the backend's cache update is no permutation of a block's elements")
    return found.argsort().reshape(shape)


def _kind(positions: torch.Tensor, kind: str) -> KindLayout:
    """Describe [head, token, dim] places as digits of fixed strides."""
    offset = int(positions[0, 0, 0])
    digits: dict[str, tuple[Digit, ...]] = {}
    for axis, name in enumerate(AXES):
        others: list[int | slice] = [0, 0, 0]
        others[axis] = slice(None)
        steps = positions[tuple(others)] - offset
        # Moving along one axis must add the same, wherever the other axes stand.
        shape = [1, 1, 1]
        shape[axis] = -1
        moved = positions - positions.select(axis, 0).unsqueeze(axis)
        if not torch.equal(moved, steps.reshape(shape).expand_as(positions)):
            raise LayoutError(f"a block's {kind} order along {name} depends on the other axes")
        digits[name] = _digits(steps.tolist(), f"{kind} order along {name}")
    return KindLayout(offset=offset, **digits)


def _digits(steps: list[int], what: str) -> tuple[Digit, ...]:
    """Split an axis into digits of one stride each, most significant first."""
    digits: list[Digit] = []
    while len(steps) > 1:
        stride = steps[1]
        size = next((i for i, step in enumerate(steps) if step != i * stride), len(steps))
        regular = all(step == steps[i - i % size] + i % size * stride for i, step in enumerate(steps))
        if len(steps) % size or not regular:
            raise LayoutError(f"a block's {what} is not a strided one")
        digits.append(Digit(size, stride))
        steps = steps[::size]
    return tuple(reversed(digits)) or (Digit(1, 1),)
