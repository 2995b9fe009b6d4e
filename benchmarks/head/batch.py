"""A Llama-family model that decodes many sequences in step: all of them stand at the same position."""

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.model import rms_norm, rope_tables, rotate_
from decode_daemon.engine.weights import LayerWeights, Weights

_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # cuDNN's plans anew for each length


def moved(weights: Weights, device: torch.device) -> Weights:
    """Return `weights` on `device`."""

    def there(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(device)

    layers = (LayerWeights(*(there(getattr(layer, name)) for name in layer.__dataclass_fields__)) for layer in weights.layers)  # type: ignore[arg-type]
    embedding = weights.embedding.to(device)
    head = embedding if weights.head is weights.embedding else weights.head.to(device)
    return Weights(embedding, tuple(layers), weights.final_norm.to(device), head)


class Batch:
    """The weights, and the KV caches of `rows` sequences of up to `length` tokens."""

    def __init__(self, config: LlamaConfig, weights: Weights, rows: int, length: int) -> None:
        self.config = config
        self.weights = weights
        device, dtype = weights.embedding.device, weights.embedding.dtype
        shape = (config.layers, 2, rows, config.kv_heads, length, config.head_dim)
        self._cache = torch.empty(shape, dtype=dtype, device=device)
        self._cos, self._sin = (table.to(device, dtype) for table in rope_tables(config, length))

    @torch.no_grad()
    @sdpa_kernel(_ATTENTION)
    def states(self, ids: torch.Tensor, position: int) -> torch.Tensor:
        """Append `ids` [rows] to the sequences at `position`; return the states before the final norm, [rows, hidden]."""
        eps = self.config.rms_eps
        cos, sin = self._cos[position], self._sin[position]
        x = functional.embedding(ids, self.weights.embedding)
        for layer, cache in zip(self.weights.layers, self._cache, strict=True):
            queries = self._project(layer, rms_norm(x, layer.input_norm, eps), cos, sin, cache, position)
            k, v = cache[:, :, :, : position + 1].unbind(0)
            x = x + functional.linear(functional.scaled_dot_product_attention(queries, k, v).flatten(1), layer.output)
            gate, up = functional.linear(rms_norm(x, layer.post_norm, eps), layer.gate_up).chunk(2, dim=-1)
            x = x + functional.linear(functional.silu(gate) * up, layer.down)
        return x

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return what `states` [rows, hidden] say comes next, [rows, vocab]."""
        return functional.linear(rms_norm(states, self.weights.final_norm, self.config.rms_eps), self.weights.head)

    def _project(
        self, layer: LayerWeights, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: torch.Tensor, position: int
    ) -> torch.Tensor:
        """Store K and V at `position`; return the rotated queries, those that share a KV head together.

        `cache` is [2, rows, kv_heads, length, head_dim]; the result [rows, kv_heads, group, head_dim].
        """
        config = self.config
        qkv = functional.linear(x, layer.qkv, layer.qkv_bias).view(-1, config.heads + 2 * config.kv_heads, config.head_dim)
        queries, turned = qkv[:, : config.heads], qkv[:, : config.heads + config.kv_heads]
        if layer.q_norm is not None and layer.k_norm is not None:
            queries.copy_(rms_norm(queries, layer.q_norm, config.rms_eps))
            turned[:, config.heads :].copy_(rms_norm(turned[:, config.heads :], layer.k_norm, config.rms_eps))
        rotate_(turned, cos, sin)
        cache[:, :, :, position] = qkv[:, config.heads :].view(-1, 2, config.kv_heads, config.head_dim).transpose(0, 1)
        return queries.reshape(-1, config.kv_heads, config.heads // config.kv_heads, config.head_dim)
