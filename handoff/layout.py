"""A whole model's paged KV cache, described so that another process can read its blocks: layers, and the blocks they have."""

import hashlib
import math
from collections.abc import Sequence
from itertools import accumulate

import msgspec

from handoff.blocks import (
    AXES,
    DTYPE_BYTES,
    FP8_BYTES,
    MAX_ELEMENTS,
    Axis,
    Block,
    Digit,
    GqaBlock,
    IndexBlock,
    KindLayout,
    LatentBlock,
    LatentForm,
    LayoutError,
    contiguous_block,
)

__all__ = [
    "AXES",
    "DTYPE_BYTES",
    "FP8_BYTES",
    "Axis",
    "Block",
    "Digit",
    "GqaBlock",
    "IndexBlock",
    "KVLayout",
    "KindLayout",
    "LatentBlock",
    "LatentForm",
    "Layer",
    "LayoutError",
    "contiguous_block",
    "uniform",
]

_MAX_LAYERS = 4096
_MAX_BLOCKS = 64
_MAX_NAME = 256  # characters: a daemon keeps the layouts of all its connectors
_ALIGNMENT = 4  # bytes: the widest element of any block, so that every layer of a landing region can be read in place


class Layer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One layer of the cache: its name in vLLM, and which of the layout's blocks it has.

    key_scale, value_scale: what fp8 keys and values are multiplied with to have their worth back; None for other dtypes.
    """

    name: str
    block: int
    key_scale: float | None = None
    value_scale: float | None = None


class KVLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cache: `layers` in execution order, and the different `blocks` that they have.

    A landing region holds layer after layer, each with all of the prompt's blocks in order.
    """

    layers: tuple[Layer, ...]
    blocks: tuple[Block, ...]

    @property
    def fingerprint(self) -> str:
        """Return 16 hex digits that differ whenever any field does."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()[:16]

    @property
    def block_tokens(self) -> int:
        """Positions in one block, of any layer."""
        return self.blocks[0].block_tokens

    @property
    def replicated(self) -> bool:
        """Whether every tensor-parallel rank holds the same bytes, as with latent and index caches."""
        return not any(isinstance(block, GqaBlock) for block in self.blocks)

    def block(self, layer: int) -> Block:
        """Return the block of the layer at this index."""
        return self.blocks[self.layers[layer].block]

    def block_bytes(self, layer: int) -> int:
        """Bytes in one block of the layer at this index."""
        return self.block(layer).block_bytes

    def blocks_for(self, tokens: int) -> int:
        """Blocks of one layer that hold `tokens` positions."""
        return -(-tokens // self.block_tokens)

    def offsets(self, tokens: int) -> tuple[int, ...]:
        """Bytes from a landing region's start to each layer's first block, for `tokens` positions."""
        return self._bounds(tokens)[:-1]

    def bytes_for(self, tokens: int) -> int:
        """Bytes in a landing region for `tokens` positions, all layers."""
        return self._bounds(tokens)[-1]

    def validate(self) -> None:
        """Raise LayoutError, naming the field, if the description is not one of a readable cache."""
        if not 1 <= len(self.layers) <= _MAX_LAYERS:
            raise LayoutError("layers is empty" if not self.layers else f"layers has more than {_MAX_LAYERS} entries")
        if not 1 <= len(self.blocks) <= _MAX_BLOCKS:
            raise LayoutError("blocks is empty" if not self.blocks else f"blocks has more than {_MAX_BLOCKS} entries")
        if (longest := max(len(layer.name) for layer in self.layers)) > _MAX_NAME:
            raise LayoutError(f"layers has a name of {longest} characters, {_MAX_NAME} at the most")
        if len({layer.name for layer in self.layers}) != len(self.layers):
            raise LayoutError("layers has a name twice")
        self._validate_references()
        sizes = sorted({block.block_tokens for block in self.blocks})
        if len(sizes) != 1:
            raise LayoutError(f"block_tokens differs between layers: {', '.join(map(str, sizes))}")
        if sum(block.elements for block in self.blocks if isinstance(block, GqaBlock)) > MAX_ELEMENTS:
            raise LayoutError(f"blocks have more than {MAX_ELEMENTS} elements together")
        for block in self.blocks:
            block.validate()
            if block.block_bytes % _ALIGNMENT:
                raise LayoutError(f"a block of {block.block_bytes} bytes is no multiple of {_ALIGNMENT} bytes")
        for layer in self.layers:
            _validate_scales(layer, self.blocks[layer.block])

    def _validate_references(self) -> None:
        """One cache has one description: each block is used, none stands there twice, the first used comes first."""
        for layer in self.layers:
            if not 0 <= layer.block < len(self.blocks):
                raise LayoutError(f"layer {layer.name!r} has block {layer.block} of {len(self.blocks)}")
        if list(dict.fromkeys(layer.block for layer in self.layers)) != list(range(len(self.blocks))):
            raise LayoutError("blocks is not in the order of the layers that first use them, each used")
        if len(set(self.blocks)) != len(self.blocks):
            raise LayoutError("blocks has a block twice")

    def _bounds(self, tokens: int) -> tuple[int, ...]:
        """Where each layer begins, and where the last one ends."""
        blocks, sizes = self.blocks_for(tokens), [block.block_bytes for block in self.blocks]
        return tuple(accumulate((blocks * sizes[layer.block] for layer in self.layers), initial=0))


def uniform(names: Sequence[str], block: Block, *, scale: float | None = None) -> KVLayout:
    """Describe a cache whose layers, of these `names`, all have the same block, and one `scale` for keys and values."""
    return KVLayout(tuple(Layer(name, 0, scale, scale) for name in names), (block,))


def _validate_scales(layer: Layer, block: Block) -> None:
    scaled = isinstance(block, GqaBlock) and block.dtype in FP8_BYTES
    for name, scale in (("key_scale", layer.key_scale), ("value_scale", layer.value_scale)):
        if scaled and (scale is None or not math.isfinite(scale) or scale <= 0):
            raise LayoutError(f"{name} of layer {layer.name!r} is {scale}, not a positive number as its fp8 block needs")
        if not scaled and scale is not None:
            raise LayoutError(f"{name} of layer {layer.name!r} is {scale}, but its block is not scaled by one")
