"""A `Multiplier` in Triton, and the choice between it and the ring.

It runs in Triton's interpreter, takes fp8 weights, and serves wherever the ring cannot.
"""

import torch

from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.cuda.multiply import Multiplier, Product
from decode_daemon.engine.cuda.plan import Plan
from decode_daemon.engine.cuda.products import SLOTS, product
from decode_daemon.engine.cuda.quantized import Quantized
from decode_daemon.engine.cuda.ring import Ring, unusable
from decode_daemon.engine.cuda.tiles import tile_for


def multiplier_for(config: LlamaConfig, device: torch.device, *, quantized: bool, overlap: bool, plan: Plan) -> Multiplier:
    """Return what multiplies on `device` for a model of this shape: the ring where it can, else Triton's kernels."""
    if device.type != "cuda":
        why = "there is no GPU"
    elif quantized:
        why = "weights are fp8"
    elif reason := unusable(config, device):
        why = reason
    else:
        try:
            return Ring(device, config.rms_eps, overlap=overlap)
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
    return Tiled(config.rms_eps, overlap=overlap, plan=plan, why=why)


class Tiled:
    """A `Multiplier` whose programs have a tile each."""

    x_dtype = torch.float32

    def __init__(self, eps: float, *, overlap: bool, plan: Plan, why: str) -> None:
        """`overlap` as in `Step`; `why` it is not the ring."""
        self.name = f"triton, because {why}"
        self._eps, self._overlap, self._plan = eps, overlap, plan

    def packed(self, field: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor`."""
        return tensor

    def cut(self, outputs: int) -> tuple[int, int]:
        """Return zeros: nothing is packed."""
        return 0, 0

    def beside(self, launched: object) -> None:
        """Need nothing of it."""

    def queue(self, width: int, product_: Product) -> None:
        """Queue a product; see `Multiplier.queue`."""
        one, norm = product_, product_.next_norm
        inputs, outputs = one.x.shape[1], one.out.shape[1]
        values, factors = (one.weight.values, one.weight.scale) if isinstance(one.weight, Quantized) else (one.weight, None)
        tile = self._plan.tiles.get((inputs, values.shape[0])) or tile_for(
            inputs, outputs, gated=one.gated, element_bytes=values.element_size()
        )
        gain, scaled, squares = (norm.gain, norm.scaled, norm.squares) if norm else (None, None, None)
        product[(-(-outputs // tile.rows),)](
            *(one.out, one.x, values, one.out if norm else one.bias, one.squares, gain, scaled, squares, one.peaks),
            self._eps,
            inputs=inputs,
            outputs=outputs,
            width=width,
            rows=tile.rows,
            columns=tile.columns,
            depth=tile.depth,
            normed=one.squares is not None,
            gated=one.gated,
            biased=one.bias is not None,
            residual=norm is not None,
            peaked=one.peaks is not None,
            slots=SLOTS,
            overlap=self._overlap,
            factors=factors,
            num_warps=tile.warps,
            enable_fp_fusion=True,
            **({"launch_pdl": True} if self._overlap else {}),  # Triton's interpreter does not know it
        )
