"""One step of a Llama-family decoder over a static KV cache.

Written for a single row: every matrix is read once, front to back, by `torch.mv`, which on CPUs runs a one-row product
nearer to the memory's speed than `F.linear` does (measured on the vocabulary head of SmolLM2, bfloat16: 2.7 ms against
5.3 ms). It knows nothing about sampling or about when to stop.
"""

from collections.abc import Sequence

import torch
from torch.nn import functional

from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.protocol import EngineError
from decode_daemon.engine.rope import rope_frequencies, rope_magnitude
from decode_daemon.engine.weights import LayerWeights, Weights


def rope_tables(config: LlamaConfig, context_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin, each float32 [context_tokens, head_dim], laid out for `rotate_`.

    The first half of sin is negated, so that turning a head takes one roll and one multiply-add.
    """
    angles = torch.outer(torch.arange(context_tokens, dtype=torch.float32), rope_frequencies(config))
    magnitude = rope_magnitude(config)
    cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate_(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Apply RoPE in place, in the half-split form (dimension i pairs with i + head_dim / 2).

    `heads` is [width, heads, head_dim]; `cos` and `sin` are rows of `rope_tables`, [width, 1, head_dim].
    """
    swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
    heads.mul_(cos).addcmul_(swapped, sin)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dimension of `x` by its root mean square, in float32, and return `x`'s dtype."""
    return functional.rms_norm(x, weight.shape, weight, eps)


def product(x: torch.Tensor, weight: torch.Tensor, addend: torch.Tensor | None = None) -> torch.Tensor:
    """Return x @ weight.T (+ addend): [width, inputs] and [outputs, inputs] give [width, outputs].

    `addend` is a bias [outputs] or a residual [width, outputs].
    """
    if x.shape[0] > 1:
        return functional.linear(x, weight) if addend is None else functional.linear(x, weight) + addend
    row = x.view(-1)
    one = torch.mv(weight, row) if addend is None else torch.addmv(addend.view(-1), weight, row)
    return one.unsqueeze(0)


def empty_cache(config: LlamaConfig, dtype: torch.dtype, device: torch.device, context_tokens: int) -> torch.Tensor:
    """Return the KV cache of one sequence: [layers, 2, kv_heads, context_tokens, head_dim], K (rotated) before V."""
    shape = (config.layers, 2, config.kv_heads, context_tokens, config.head_dim)
    return torch.zeros(shape, dtype=dtype, device=device)


def check_positions(position: int, width: int, context_tokens: int) -> None:
    """Raise EngineError unless `width` positions from `position` on lie inside the context."""
    end = position + width
    if not 0 <= position < end <= context_tokens:
        raise EngineError(f"positions {position} to {end - 1} do not fit a context of {context_tokens} tokens")


class LlamaModel:
    """The weights and the KV cache of one sequence, with steps in PyTorch; a `StepModel`."""

    widest = 1  # PyTorch multiplies one row by other kernels than several: the last bits differ

    def __init__(self, config: LlamaConfig, weights: Weights, context_tokens: int) -> None:
        self.config = config
        self.context_tokens = context_tokens
        self._weights = weights
        dtype, device = weights.embedding.dtype, weights.embedding.device
        self.cache = empty_cache(config, dtype, device, context_tokens)
        self._cos, self._sin = (table.to(device, dtype).unsqueeze(1) for table in rope_tables(config, context_tokens))
        self._hidden = torch.zeros(0, config.hidden, dtype=dtype, device=device)

    def forward(self, ids: torch.Tensor, position: int) -> torch.Tensor:
        """Store the KV of `ids` at `position` and on; return the logits after each; see `StepModel.forward`."""
        end = position + ids.shape[0]
        check_positions(position, ids.shape[0], self.context_tokens)
        eps = self.config.rms_eps
        cos, sin = self._cos[position:end], self._sin[position:end]
        # One slice for all layers: slicing per layer costs more than the small operations between the products.
        written = self.cache[:, :, :, position:end].unbind(0)
        keys = self.cache[:, 0, :, :end].chunk(self.config.layers)
        values = self.cache[:, 1, :, :end].chunk(self.config.layers)
        x = functional.embedding(ids, self._weights.embedding)
        for layer, place, k, v in zip(self._weights.layers, written, keys, values, strict=True):
            queries = self._project(layer, rms_norm(x, layer.input_norm, eps), cos, sin, place)
            x = product(self._attend(queries, k, v, position), layer.output, x)
            gate, up = product(rms_norm(x, layer.post_norm, eps), layer.gate_up).chunk(2, dim=-1)
            x = product(functional.silu(gate) * up, layer.down, x)
        self._hidden = x
        return product(rms_norm(x, self._weights.final_norm, eps), self._weights.head)

    def greedy(self, token: int, position: int) -> int | None:
        """Return the id of the largest logit after `token`; see `StepModel.greedy`."""
        return self.bests((token,), position)[0]

    def bests(self, ids: Sequence[int], position: int) -> list[int | None]:
        """Return the id of the largest logit after each of `ids`; see `StepModel.bests`."""
        rows = self.forward(torch.tensor(ids), position)
        # The sum of finite logits is finite in float32, and that of others is not: one pass instead of two.
        return [int(row.argmax()) if row.float().sum().isfinite() else None for row in rows]

    def hidden(self, rows: int) -> torch.Tensor:
        """Return the last step's rows before the final norm; see `StepModel.hidden`."""
        return self._hidden[:rows].clone()

    def _project(
        self, layer: LayerWeights, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, place: torch.Tensor
    ) -> torch.Tensor:
        """Store the new K and V in `place`, [2, kv_heads, width, head_dim]; return rotated queries [width, heads, dim]."""
        heads, kv_heads, head_dim = self.config.heads, self.config.kv_heads, self.config.head_dim
        qkv = product(x, layer.qkv, layer.qkv_bias).view(-1, heads + 2 * kv_heads, head_dim)
        queries, turned = qkv[:, :heads], qkv[:, : heads + kv_heads]
        if layer.q_norm is not None and layer.k_norm is not None:
            queries.copy_(rms_norm(queries, layer.q_norm, self.config.rms_eps))
            turned[:, heads:].copy_(rms_norm(turned[:, heads:], layer.k_norm, self.config.rms_eps))
        rotate_(turned, cos, sin)
        place.copy_(qkv[:, heads:].view(-1, 2, kv_heads, head_dim).permute(1, 2, 0, 3))
        return queries

    def _attend(self, queries: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: int) -> torch.Tensor:
        """Return each row's attention over the positions up to its own, [width, heads * head_dim].

        The heads that share a KV head are the rows of one query block, so that K and V are read once and never repeated.
        """
        width, heads, head_dim = queries.shape
        grouped = queries.view(width, k.shape[1], heads // k.shape[1], head_dim)
        if width == 1:
            return functional.scaled_dot_product_attention(grouped, k, v).view(1, -1)
        rows = (
            functional.scaled_dot_product_attention(grouped[n : n + 1], k[:, :, :end], v[:, :, :end])
            for n, end in enumerate(range(position + 1, position + width + 1))
        )
        return torch.cat(tuple(rows)).view(width, -1)
