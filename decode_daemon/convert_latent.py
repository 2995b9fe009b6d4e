"""From vLLM's blocks of latent attention and of the sparse index, as they landed, to floating-point rows.

PyTorch operations only, so that they run where the tensors are. Every rank of vLLM holds the same bytes, so there is one shard.
"""

from collections.abc import Iterator

import torch

from handoff.blocks import QUANT_GROUP
from handoff.layout import Block, IndexBlock, KVLayout, LatentBlock


def convert_latent(landed: torch.Tensor, layout: KVLayout, latents: torch.Tensor, ropes: torch.Tensor) -> None:
    """Copy the latent rows of all layers that have them.

    landed: uint8, layer after layer, `layout.bytes_for(tokens)` bytes.
    latents, ropes: [latent layers, tokens, latent_dim] and [latent layers, tokens, rope_dim], of any floating-point dtype: a
    latent is multiplied by its scale in float32, then rounded once.
    """
    tokens = latents.shape[1]
    found = ((block, raw) for block, raw in _layers(landed, layout, tokens) if isinstance(block, LatentBlock))
    for (block, raw), latent, rope in zip(found, latents, ropes, strict=True):
        rows = raw.view(-1, block.row_bytes)[:tokens]
        rope.copy_(rows[:, -2 * block.rope_dim :].view(torch.bfloat16))
        if block.form == "bfloat16":
            latent.copy_(rows[:, : 2 * block.latent_dim].view(torch.bfloat16))
        else:
            latent.copy_(_scaled(rows[:, : block.latent_dim], rows[:, block.latent_dim : -2 * block.rope_dim]))


def convert_index(landed: torch.Tensor, layout: KVLayout, keys: torch.Tensor) -> None:
    """Copy the index keys of all layers that have them.

    landed: as in `convert_latent`. keys: [index layers, tokens, dim], of any floating-point dtype.
    """
    tokens = keys.shape[1]
    found = ((block, raw) for block, raw in _layers(landed, layout, tokens) if isinstance(block, IndexBlock))
    for (block, raw), target in zip(found, keys, strict=True):
        pages = raw.view(-1, block.block_bytes)
        values = block.block_tokens * block.dim
        target.copy_(_scaled(pages[:, :values], pages[:, values:]).view(-1, block.dim)[:tokens])


def _layers(landed: torch.Tensor, layout: KVLayout, tokens: int) -> Iterator[tuple[Block, torch.Tensor]]:
    bounds = (*layout.offsets(tokens), layout.bytes_for(tokens))
    for index in range(len(layout.layers)):
        yield layout.block(index), landed[bounds[index] : bounds[index + 1]]


def _scaled(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiply float8_e4m3fn `values` by the float32 scale of each 128 of them; both uint8, [rows, bytes]."""
    groups = values.view(torch.float8_e4m3fn).to(torch.float32).view(values.shape[0], -1, QUANT_GROUP)
    return (groups * scales.view(torch.float32).unsqueeze(2)).flatten(1)
