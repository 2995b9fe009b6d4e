"""What a step multiplies, said once for both ways of doing it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from decode_daemon.engine.cuda.quantized import Quantized

Packed = Callable[[str, torch.Tensor], torch.Tensor]  # see `Multiplier.packed`


@dataclass(frozen=True, slots=True)
class NextNorm:
    """A product's sums are added to `out`, and the norm that follows is prepared: `out` times its gain, and sums of squares."""

    gain: torch.Tensor  # [outputs]
    scaled: torch.Tensor  # [8, outputs]: gets out * gain
    squares: torch.Tensor  # int64 [8]: gets the sums of squares of `out`, counted as in products.py


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix times up to eight rows."""

    out: torch.Tensor  # [8, outputs]
    x: torch.Tensor  # [8, inputs]
    weight: torch.Tensor | Quantized  # [outputs, inputs], or [2 * outputs, inputs] when gated, as `Multiplier.packed` has it
    squares: torch.Tensor | None = None  # int64 [8]: of what `x` was before its norm's gain
    bias: torch.Tensor | None = None  # [outputs]
    next_norm: NextNorm | None = None
    peaks: torch.Tensor | None = None  # int64 [8, slots]: each row's largest output, see products.py
    gated: bool = False  # out = silu(gate) * up


class Multiplier(Protocol):
    """How products are computed on one device."""

    name: str  # for people
    x_dtype: torch.dtype  # of what a norm or attention prepares for a product

    def packed(self, field: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return what is a matrix of the weights' `field` as `queue` wants it; anything else as it is."""
        ...

    def cut(self, outputs: int) -> tuple[int, int]:
        """Return the rows and columns that lie together in a packed matrix of so many rows; zeros where none is packed."""
        ...

    def queue(self, width: int, product: Product) -> None:
        """Queue a product of `width` (1, 2, 4 or 8) rows on the current stream."""
        ...

    def beside(self, launched: object) -> None:
        """Take in another kernel of the step, as Triton's launcher returned it."""
        ...
