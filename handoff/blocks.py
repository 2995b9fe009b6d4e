"""How one block of one layer's paged KV cache lies in memory: grouped-query attention, latent attention, sparse index.

A block of grouped-query attention is a fixed order of its keys and of its values ([head, token, dim] each). Every order in use
(token-major, head-major, transposed keys, tiles for matrix units) splits each axis into digits with one stride each, so a block
is a strided view: that is all a reader needs, and it is small enough to compare field by field. The other two kinds have one
order each, which vLLM's own kernels fix.
"""

import math
from typing import Literal

import msgspec

Axis = Literal["head", "token", "dim"]
AXES: tuple[Axis, ...] = ("head", "token", "dim")

_MAX_DIGITS = 16  # of one axis; the most in use are three
MAX_ELEMENTS = 1 << 22  # four times the largest block in use; validation counts them one by one
_MAX_ROWS = 1 << 16  # of a block whose order is fixed: nothing is counted there

FP8_BYTES = {"float8_e4m3fn": 1, "float8_e5m2": 1}
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4} | FP8_BYTES

QUANT_GROUP = 128  # values that share one float32 scale, in latent rows and index keys
_SCALE_BYTES = 4


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


class GqaBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="gqa", tag_field="kind"):
    """One layer's block of grouped-query attention, as one tensor-parallel rank holds it. Keys are rotated (RoPE applied).

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
        if min(sizes.values()) < 1 or self.elements > MAX_ELEMENTS:
            raise LayoutError(f"a block of {sizes} is not one of {MAX_ELEMENTS} elements at the most")
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


LatentForm = Literal["bfloat16", "fp8_ds_mla"]


class LatentBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="latent", tag_field="kind"):
    """One layer's block of multi-head latent attention: one row a token, the same on every tensor-parallel rank.

    A row is the latent vector after kv_a_layernorm, then the rotated rope part in interleaved pair order. "bfloat16": both as
    bfloat16. "fp8_ds_mla": `latent_dim` float8_e4m3fn values, one float32 scale for each 128 of them, the rope part as
    bfloat16 (656 bytes for 512 + 64), as vLLM's concat_and_cache_mla writes it.
    """

    block_tokens: int
    latent_dim: int = 512
    rope_dim: int = 64
    form: LatentForm = "bfloat16"

    @property
    def row_bytes(self) -> int:
        """Bytes of one token."""
        if self.form == "fp8_ds_mla":
            return self.latent_dim + self.latent_dim // QUANT_GROUP * _SCALE_BYTES + 2 * self.rope_dim
        return 2 * (self.latent_dim + self.rope_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes in one block."""
        return self.block_tokens * self.row_bytes

    def validate(self) -> None:
        """Raise LayoutError, naming the field, unless the sizes are those of a cache."""
        _require_sizes(block_tokens=self.block_tokens, latent_dim=self.latent_dim, rope_dim=self.rope_dim)
        if self.rope_dim % 2:
            raise LayoutError(f"rope_dim {self.rope_dim} is odd, but rotated in pairs")
        if self.form == "fp8_ds_mla" and self.latent_dim % QUANT_GROUP:
            raise LayoutError(f"latent_dim {self.latent_dim} is no multiple of {QUANT_GROUP}, as fp8_ds_mla needs")


class IndexBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="index", tag_field="kind"):
    """One layer's block of sparse attention's index keys, the same on every tensor-parallel rank.

    First the float8_e4m3fn values of all tokens, [block_tokens, dim], then the float32 scales of all tokens, one for each 128
    values (8,192 + 256 bytes for 64 tokens of 128), as vLLM's indexer_k_quant_and_cache writes them.
    """

    block_tokens: int
    dim: int = 128

    @property
    def block_bytes(self) -> int:
        """Bytes in one block."""
        return self.block_tokens * (self.dim + self.dim // QUANT_GROUP * _SCALE_BYTES)

    def validate(self) -> None:
        """Raise LayoutError, naming the field, unless the sizes are those of a cache."""
        _require_sizes(block_tokens=self.block_tokens, dim=self.dim)
        if self.dim % QUANT_GROUP:
            raise LayoutError(f"dim {self.dim} is no multiple of {QUANT_GROUP}, the values that share a scale")


Block = GqaBlock | LatentBlock | IndexBlock
"""A block of any kind; each has `block_tokens`, `block_bytes` and `validate()`."""


def contiguous_block(
    *, kv_heads: int, head_dim: int, block_tokens: int, dtype: str, order: tuple[Axis | Literal["kind"], ...]
) -> GqaBlock:
    """Describe a plain block whose axes lie in `order`, outermost first (kind, token, head, dim is FlashAttention's NHD)."""
    sizes = {"kind": 2, "head": kv_heads, "token": block_tokens, "dim": head_dim}
    strides: dict[str, int] = {}
    stride = 1
    for name in reversed(order):
        strides[name] = stride
        stride *= sizes[name]
    digits = {name: (Digit(sizes[name], strides[name]),) for name in AXES}
    return GqaBlock(
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_tokens=block_tokens,
        dtype=dtype,
        keys=KindLayout(offset=0, **digits),
        values=KindLayout(offset=strides["kind"], **digits),
    )


def _require_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if not 1 <= size <= _MAX_ROWS:
            raise LayoutError(f"{name} {size} is not 1 to {_MAX_ROWS}")
