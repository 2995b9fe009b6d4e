"""Weights of the layers as e4m3 (float8_e4m3fn) with a scale for each row: half of bfloat16's bytes, and other numbers.

Embedding, head, norms and biases stay as they are. Activations do too, and every sum is one of float32.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.protocol import EngineError
from decode_daemon.engine.weights import LayerWeights, Weights

WeightsKind = Literal["as-is", "fp8"]

LARGEST = 448.0  # of e4m3
_SMALLEST = 2.0**-100  # rows whose largest element is smaller are as good as zero: their scale could not be divided by
_BLOCK = 512  # bytes that a warp loads at once
_QUAD = 4  # inputs that lie side by side: 16 bytes of float32 `x`
_VECTOR = 16  # inputs whose weights a thread loads at once
_CHUNK = 1 << 24  # elements that are float32 at once while a matrix is quantized


@dataclass(frozen=True, slots=True)
class Quantized:
    """A matrix as e4m3 times a scale for each row.

    Within each block of 512 inputs (or the largest power of two that divides a row) `values` have an order of their own: the
    block's four quarters are dealt out in turn, four inputs of each. Where 32 threads each take 16 values side by side, the
    inputs that they need at a time then lie side by side.
    """

    values: torch.Tensor  # float8_e4m3fn [outputs, inputs]
    scale: torch.Tensor  # float32 [outputs]

    @classmethod
    def of(cls, matrix: torch.Tensor) -> "Quantized":
        """Return `matrix` [outputs, inputs] rounded to the nearest values, on its device; memory beside it: under 200 MB.

        An element is wrong by at most 2**-4 of itself, or by 2**-10 of its row's scale. `inputs` is a multiple of 16.
        """
        outputs, inputs = matrix.shape
        values = torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn, device=matrix.device)
        scale = torch.empty(outputs, dtype=torch.float32, device=matrix.device)
        rows = max(1, _CHUNK // inputs)
        for part, kept, scales in zip(*(torch.split(whole, rows) for whole in (matrix, values, scale)), strict=True):
            exact = part.float()
            largest = exact.abs().amax(dim=1)
            scales.copy_(torch.where(largest > 0, largest.clamp(min=_SMALLEST) / LARGEST, 1.0))
            kept.copy_(_dealt((exact / scales[:, None]).clamp_(-LARGEST, LARGEST)))
        return cls(values, scale)

    @property
    def shape(self) -> torch.Size:
        """[outputs, inputs]."""
        return self.values.shape

    def dequantized(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the matrix that this is, [outputs, inputs] in the usual order."""
        quads = self.values.to(dtype).view(self.shape[0], -1, _block(self.shape[1]) // _VECTOR, 4, _QUAD)
        return quads.transpose(2, 3).reshape(self.shape) * self.scale[:, None].to(dtype)


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """As `LayerWeights`, with quantized matrices."""

    input_norm: torch.Tensor
    qkv: Quantized
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Quantized
    post_norm: torch.Tensor
    gate_up: Quantized
    down: Quantized

    def dequantized(self, dtype: torch.dtype) -> LayerWeights:
        """Return the layer that this is; norms and biases keep their dtype."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return LayerWeights(
            **{name: part.dequantized(dtype) if isinstance(part, Quantized) else part for name, part in fields.items()}
        )


@dataclass(frozen=True, slots=True)
class QuantizedWeights:
    """As `Weights`, with quantized matrices in the layers."""

    embedding: torch.Tensor
    layers: tuple[QuantizedLayer, ...]
    final_norm: torch.Tensor
    head: torch.Tensor

    def dequantized(self, dtype: torch.dtype) -> Weights:
        """Return the model that this is; what is not quantized keeps its dtype."""
        layers = tuple(layer.dequantized(dtype) for layer in self.layers)
        return Weights(self.embedding, layers, self.final_norm, self.head)


def quantized(weights: Weights, device: torch.device) -> QuantizedWeights:
    """Return `weights` on `device`, each matrix quantized there and given up before the next one comes."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device).contiguous()

    def layer(whole: LayerWeights) -> QuantizedLayer:
        def some(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else moved(tensor)

        return QuantizedLayer(
            input_norm=moved(whole.input_norm),
            qkv=Quantized.of(moved(whole.qkv)),
            qkv_bias=some(whole.qkv_bias),
            q_norm=some(whole.q_norm),
            k_norm=some(whole.k_norm),
            output=Quantized.of(moved(whole.output)),
            post_norm=moved(whole.post_norm),
            gate_up=Quantized.of(moved(whole.gate_up)),
            down=Quantized.of(moved(whole.down)),
        )

    embedding = moved(weights.embedding)
    head = embedding if weights.head is weights.embedding else moved(weights.head)
    return QuantizedWeights(embedding, tuple(map(layer, weights.layers)), moved(weights.final_norm), head)


def check_quantizable(config: LlamaConfig, ranks: int = 1, step: str = "cuda") -> None:
    """Raise EngineError, naming what is in the way, unless `step` on `ranks` GPUs takes fp8 weights of this shape."""
    if step not in ("auto", "cuda"):
        raise EngineError(f"fp8 weights need the CUDA step, and step is {step}: set step to cuda, or weights to as-is")
    if ranks > 1:
        raise EngineError(f"weights is fp8 and tensor_parallel is {ranks}: set tensor_parallel to 1, or weights to as-is")
    rows = {"hidden_size": config.hidden, "heads times head_dim": config.heads * config.head_dim}
    for name, inputs in (rows | {"intermediate_size": config.intermediate}).items():
        if inputs % _VECTOR:
            raise EngineError(f"{name} is {inputs}, and fp8 weights need a multiple of {_VECTOR}: set weights to as-is")


def _block(inputs: int) -> int:
    return min(_BLOCK, inputs & -inputs)


def _dealt(rows: torch.Tensor) -> torch.Tensor:
    """Return `rows` [outputs, inputs] in the order of `Quantized`."""
    quads = rows.view(rows.shape[0], -1, 4, _block(rows.shape[1]) // _VECTOR, _QUAD)
    return quads.transpose(2, 3).reshape(rows.shape)
