"""From vLLM's blocks, as they landed, to the engine's cache."""

from math import prod

import torch

from handoff.layout import Digit, KindLayout, KVLayout


def convert(landed: torch.Tensor, layout: KVLayout, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Copy a prompt's KV into the engine's cache.

    landed: uint8, layer after layer, each with the prompt's blocks in order (`layout.bytes_for(tokens)` bytes).
    keys, values: [layers, kv_heads, tokens, head_dim], the dtype of the layout.
    """
    block, tokens = layout.block, keys.shape[2]
    dtype: torch.dtype = getattr(torch, block.dtype)
    elements = landed[: layout.bytes_for(tokens)].view(dtype)
    full, rest = divmod(tokens, block.block_tokens)
    for kind, target in ((block.keys, keys), (block.values, values)):
        source = _blocks(elements, layout, tokens, kind)
        split = full * block.block_tokens
        if full:
            blocks = target[:, :, :split].unflatten(2, (full, block.block_tokens))  # type: ignore[no-untyped-call]
            blocks.copy_(_joined(source[:full], layout, kind))
        if rest:
            target[:, :, split:].copy_(_joined(source[full:], layout, kind)[:, :, 0, :rest])


def _blocks(elements: torch.Tensor, layout: KVLayout, tokens: int, kind: KindLayout) -> torch.Tensor:
    """View one kind of every block: [blocks, layers, head digits..., token digits..., dim digits...]."""
    block, blocks = layout.block, layout.blocks_for(tokens)
    digits = [Digit(blocks, block.elements), Digit(len(layout.layers), blocks * block.elements)]
    digits += [*kind.head, *kind.token, *kind.dim]
    return elements.as_strided(
        [digit.size for digit in digits],
        [digit.stride for digit in digits],
        storage_offset=elements.storage_offset() + kind.offset,
    )


def _joined(source: torch.Tensor, layout: KVLayout, kind: KindLayout) -> torch.Tensor:
    """Return [layers, kv_heads, blocks, block_tokens, head_dim] of a digit view; copies where no view can join digits."""
    block = layout.block
    heads, tokens, dims = len(kind.head), len(kind.token), len(kind.dim)
    order = [1, *range(2, 2 + heads), 0, *range(2 + heads, 2 + heads + tokens + dims)]
    sizes = (len(layout.layers), block.kv_heads, source.shape[0], block.block_tokens, block.head_dim)
    assert prod(sizes) == source.numel()
    return source.permute(order).reshape(sizes)
