# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"
# Kernels are Triton's language, not Python's: their arguments are pointers and tensors that mypy has no types for.
"""One kernel that gathers keys, or values, of landed blocks into the engine's cache on a GPU.

An element's place in its block is the sum of what its head, its token and its dim add to it (see `handoff.blocks`), so three
small tables stand for every order that a layout can describe.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from decode_daemon.convert import Run
from handoff.layout import AXES, KindLayout

_TILE = 32  # tokens of one program


@triton.jit(do_not_specialize=["tokens"])  # a prompt's length must not cost it a compilation
def copy_heads(
    out,  # [layers, heads, tokens, dims], the dims of a token side by side
    landed,  # of the layers' blocks, in the blocks' dtype
    places,  # int32: of heads, then of the tokens of a block, then of dims
    scales,  # float32 [layers], read when `scaled`
    offset,  # of the kind in a block
    tokens,
    block_tokens,
    block_elements,
    layer_elements,
    out_layer,  # strides
    out_head,
    out_token,
    dims: tl.constexpr,
    columns: tl.constexpr,  # dims, rounded up to a power of two
    tile: tl.constexpr,
    scaled: tl.constexpr,
):
    """Copy `tile` tokens of one head of one layer. Grid: (tiles of tokens, heads, layers)."""
    token = tl.program_id(0) * tile + tl.arange(0, tile)
    head = tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    dim = tl.arange(0, columns)
    known = (token < tokens)[:, None] & (dim < dims)[None, :]
    of_head = tl.load(places + head)
    of_tokens = places + tl.num_programs(1)
    of_token = tl.load(of_tokens + token % block_tokens, token < tokens, 0)
    of_dim = tl.load(of_tokens + block_tokens + dim, dim < dims, 0)
    block = layer * layer_elements + (token // block_tokens).to(tl.int64) * block_elements
    element = (block + offset + of_head + of_token)[:, None] + of_dim[None, :]
    found = tl.load(landed + element, known, 0.0)
    if scaled:
        found = found.to(tl.float32) * tl.load(scales + layer)
    target = layer * out_layer + head.to(tl.int64) * out_head + token.to(tl.int64)[:, None] * out_token + dim[None, :]
    tl.store(out + target, found.to(out.dtype.element_ty), known)


def reachable(landed: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `landed` where a kernel on `device` can read it: as it is in pinned or the device's memory, else a copy there."""
    return landed if landed.is_pinned() else landed.to(device)


def gather(run: Run) -> None:
    """Copy a run's keys and values; queued on the current stream."""
    block = run.block
    dtype: torch.dtype = getattr(torch, block.dtype)
    elements = run.landed.view(dtype)
    for kind, target, scales in run.kinds:
        layers, heads, tokens, dims = target.shape
        assert target.stride(3) == 1
        copy_heads[triton.cdiv(tokens, _TILE), heads, layers](
            target,
            elements,
            _places(kind, target.device),
            scales,
            kind.offset,
            tokens,
            block.block_tokens,
            block.elements,
            elements.numel() // layers,
            *target.stride()[:3],
            dims=dims,
            columns=triton.next_power_of_2(dims),
            tile=_TILE,
            scaled=scales is not None,
            enable_fp_fusion=True,
        )


@lru_cache(maxsize=64)
def _places(kind: KindLayout, device: torch.device) -> torch.Tensor:
    """Return what each head, each token of a block and each dim add to an element's place: int32, one after another."""
    added: list[int] = []
    for axis in AXES:
        places = [0]
        for digit in kind.axis(axis):
            places = [place + value * digit.stride for place in places for value in range(digit.size)]
        added += places
    return torch.tensor(added, dtype=torch.int32, device=device)
