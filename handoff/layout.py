"""How a paged KV cache lies in memory, described so that another process can read its blocks.

A block's interior is a fixed order of its keys and of its values ([head, token, dim] each). Every order in use (token-major,
head-major, transposed keys, tiles for matrix units) splits each axis into digits with one stride each, so a block is a strided
view: that is all a reader needs, and it is small enough to compare field by field.
"""

import hashlib
import math
from typing import Literal

import msgspec

Axis = Literal["head", "token", "dim"]
AXES: tuple[Axis, ...] = ("head", "token", "dim")

_MAX_DIGITS = 16  # of one axis; the most in use are three
_MAX_ELEMENTS = 1 << 22  # four times the largest block in use; validation counts them one by one

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


class LayoutError(Exception):
    """A KV layout that cannot be described, or that the other side cannot read: the message names the field."""


class Digit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One digit of an axis: `size` values, `stride` elements apart. Most significant digit first within an axis."""

    size: int
    stride: int


class KindLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a block's keys, or its values, lie: strides count elements from `offset`, which counts from the block's start."""

    offset: int
    head: tuple[Digit, ...]
    token: tuple[Digit, ...]
    dim: tuple[Digit, ...]

    def axis(self, name: Axis) -> tuple[Digit, ...]:
        """Return one axis's digits."""
        digits: tuple[Digit, ...] = getattr(self, name)
        return digits

    def places(self) -> list[int]:
        """Return each element's place in the block, in the order of [head, token, dim]."""
        places = [self.offset]
        for name in AXES:
            for digit in self.axis(name):
                places = [place + value * digit.stride for place in places for value in range(digit.size)]
        return places


class BlockLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One attention layer's block of grouped-query attention. Keys are rotated (RoPE applied).

    Keys and values are described apart, since backends order them differently: CPU kernels transpose keys only.
    """

    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str
    keys: KindLayout
    values: KindLayout

    @property
    def elements(self) -> int:
        """Elements in one block."""
        return 2 * self.kv_heads * self.block_tokens * self.head_dim

    @property
    def block_bytes(self) -> int:
        """Bytes in one block."""
        return self.elements * DTYPE_BYTES[self.dtype]

    def validate(self) -> None:
        """Raise LayoutError unless keys and values together address each element of the block exactly once."""
        if self.dtype not in DTYPE_BYTES:
            raise LayoutError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        sizes = {"head": self.kv_heads, "token": self.block_tokens, "dim": self.head_dim}
        if min(sizes.values()) < 1 or self.elements > _MAX_ELEMENTS:
            raise LayoutError(f"a block of {sizes} is not one of {_MAX_ELEMENTS} elements at the most")
        for kind in (self.keys, self.values):
            for name in AXES:
                digits = kind.axis(name)
                if not 1 <= len(digits) <= _MAX_DIGITS:
                    raise LayoutError(f"{name} has {len(digits)} digits, not 1 to {_MAX_DIGITS}")
                product = math.prod(digit.size for digit in digits)
                if min(digit.size for digit in digits) < 1 or product != sizes[name]:
                    raise LayoutError(f"{name} digits make {product} values, not {sizes[name]}")
        if sorted(self.keys.places() + self.values.places()) != list(range(self.elements)):
            raise LayoutError("keys and values do not fill the block, each element once")


class KVLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole model's cache: `layers` names in execution order, all with the same block."""

    layers: tuple[str, ...]
    block: BlockLayout

    @property
    def fingerprint(self) -> str:
        """Return 16 hex digits that differ whenever any field does."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()[:16]

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` positions."""
        return -(-tokens // self.block.block_tokens)

    def bytes_for(self, tokens: int) -> int:
        """Bytes in a landing region for `tokens` positions, all layers."""
        return len(self.layers) * self.blocks_for(tokens) * self.block.block_bytes

    def validate(self) -> None:
        """Raise LayoutError if the description is not one of a readable cache."""
        if not self.layers:
            raise LayoutError("layers is empty")
        self.block.validate()


def contiguous_block(
    *, kv_heads: int, head_dim: int, block_tokens: int, dtype: str, order: tuple[Axis | Literal["kind"], ...]
) -> BlockLayout:
    """Describe a plain block whose axes lie in `order`, outermost first (kind, token, head, dim is FlashAttention's NHD)."""
    sizes = {"kind": 2, "head": kv_heads, "token": block_tokens, "dim": head_dim}
    strides: dict[str, int] = {}
    stride = 1
    for name in reversed(order):
        strides[name] = stride
        stride *= sizes[name]
    digits = {name: (Digit(sizes[name], strides[name]),) for name in AXES}
    return BlockLayout(
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_tokens=block_tokens,
        dtype=dtype,
        keys=KindLayout(offset=0, **digits),
        values=KindLayout(offset=strides["kind"], **digits),
    )
