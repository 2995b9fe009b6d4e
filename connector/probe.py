"""Find out how an attention backend orders a block's elements, by watching where it puts known ones.

The order depends on the backend, its version and the CPU's instruction set (AMX packs keys for its tiles), so a table would
be wrong one day and wrong text would be the symptom. The probe writes numbered keys and values through the backend's own cache
update into a scratch cache and reads where each went.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from handoff.blocks import QUANT_GROUP
from handoff.layout import AXES, DTYPE_BYTES, Digit, GqaBlock, KindLayout, LatentBlock, LayoutError

# Integers below the base are exact in the dtype.
_BASES = {"bfloat16": 256, "float16": 256, "float32": 256, "float8_e4m3fn": 16, "float8_e5m2": 8}
# Divided by its scale, an integer may come out a little too small, and vLLM's CPU kernels round to fp8 towards zero. This much
# is above such an error and below half a step of fp8, so the integer is stored however a kernel rounds.
_NUDGE = 1 + 1 / 64

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


@dataclass(frozen=True, slots=True)
class Elements:
    """What a backend makes of keys and values given as `given`: elements of `stored`, divided by their scale."""

    stored: torch.dtype
    given: torch.dtype
    key_scale: float = 1.0
    value_scale: float = 1.0


def probe_block(
    update: CacheUpdate,
    cache: torch.Tensor,
    *,
    kv_heads: int,
    head_dim: int,
    block_tokens: int,
    elements: Elements | None = None,
) -> GqaBlock:
    """Describe the interior of one block of `cache` (first axis: blocks).

    `elements`: of the cache, where its dtype does not say it (fp8 in bytes); without, they are stored as given.
    Raises LayoutError, naming what is wrong, for a cache whose blocks are not contiguous, whose dtype is not handed over, or
    whose order is not a strided one.
    """
    elements = elements or Elements(cache.dtype, cache.dtype)
    dtype = str(elements.stored).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise LayoutError(f"KV cache dtype {dtype} is not handed over (one of {', '.join(DTYPE_BYTES)} is)")
    shape = (2, kv_heads, block_tokens, head_dim)
    _require_contiguous(cache, shape)
    keys, values = _positions(update, cache, elements, shape)
    layout = GqaBlock(
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_tokens=block_tokens,
        dtype=dtype,
        keys=_kind(keys, "key"),
        values=_kind(values, "value"),
    )
    layout.validate()
    return layout


def _require_contiguous(cache: torch.Tensor, shape: tuple[int, int, int, int]) -> None:
    count = math.prod(shape)
    if cache.dim() == 5 and cache.shape[0] == 2 != cache.shape[1] and 2 * cache[0, 0].numel() == count:
        raise LayoutError("all keys lie before all values, so that no block holds both: only blocks of both are handed over")
    if cache[0].numel() != count:
        raise LayoutError(
            f"a block of shape {tuple(cache.shape[1:])} does not hold {shape} (keys and values, heads, tokens, dims)"
        )
    if cache.stride(0) != count:
        raise LayoutError(
            f"blocks of {count} elements lie {cache.stride(0)} apart, with others between or inside them: "
            "VLLM_KV_CACHE_LAYOUT=HND keeps a layer's blocks together"
        )


def _positions(update: CacheUpdate, cache: torch.Tensor, elements: Elements, shape: tuple[int, int, int, int]) -> torch.Tensor:
    """Return, for each [kind, head, token, dim], the element's place in its block."""
    count, base = math.prod(shape), _BASES[str(elements.stored).removeprefix("torch.")]
    scales = torch.tensor((elements.key_scale, elements.value_scale)).reshape(2, 1, 1, 1)
    if elements.stored != elements.given:
        scales *= _NUDGE
    numbers = torch.arange(count).reshape(shape)
    found = torch.zeros(count, dtype=torch.int64)
    worth = 1
    while worth < count:
        digits = (numbers // worth % base * scales).to(elements.given).to(cache.device)
        # Two blocks, written to the second, so that a backend's use of the slot mapping is probed too.
        scratch = torch.empty_strided((2, *cache.shape[1:]), cache.stride(), dtype=cache.dtype, device=cache.device)
        scratch.zero_()
        slots = torch.arange(shape[2], 2 * shape[2], dtype=torch.int64, device=cache.device)
        keys, values = (kind.transpose(0, 1).contiguous() for kind in digits)
        update(keys, values, scratch, slots)
        written = scratch.as_strided((count,), (1,), count).view(elements.stored)
        found += written.cpu().to(torch.float32).to(torch.int64) * worth
        worth *= base
    if not torch.equal(found.sort().values, torch.arange(count)):
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


def check_rows(layer: Any, cache: torch.Tensor, block: LatentBlock) -> None:
    """Have a latent attention layer write known rows into a scratch cache like `cache`, [blocks, tokens, row], and read them.

    Raises LayoutError where they are not `block`'s rows. A backend that writes them within its attention is taken at its shape.
    """
    update = getattr(layer.impl, "do_kv_cache_update", None)
    if update is None:
        return
    tokens = cache.shape[1]
    generator = torch.Generator().manual_seed(0)
    latents = torch.randint(0, 16, (tokens, block.latent_dim), generator=generator)
    ropes = torch.randint(0, 256, (tokens, block.rope_dim), generator=generator).to(torch.bfloat16)
    if block.form == "fp8_ds_mla":  # with float8_e4m3fn's largest value among them, a group's scale is 1
        latents[:, ::QUANT_GROUP] = 448
        scales = torch.ones(tokens, block.latent_dim // QUANT_GROUP, dtype=torch.float32)
        parts: tuple[torch.Tensor, ...] = (latents.to(torch.float8_e4m3fn), scales, ropes)
    else:
        parts = (latents.to(torch.bfloat16), ropes)
    scratch = torch.zeros_like(cache[:2])
    slots = torch.arange(tokens, 2 * tokens, dtype=torch.int64, device=cache.device)
    given = latents.to(torch.bfloat16).to(cache.device), ropes.unsqueeze(1).to(cache.device)
    update(*given, scratch, slots, layer.kv_cache_dtype, layer._k_scale)
    expected = torch.cat([part.view(torch.uint8) for part in parts], dim=1)
    if not torch.equal(scratch[1].view(torch.uint8).cpu(), expected) or scratch[0].any():
        raise LayoutError(f"{type(layer.impl).__name__} writes other rows than those of {block}")
