"""One step of a Llama-family decoder as launches on the current stream, from ids in device memory to ids in device memory.

Six kernels a layer: QKV product, attention, its splits joined, output product (adds to the rows and prepares the norm that
follows), gate and up product (SiLU * up after it), down product (as the output product). Every buffer is allocated once, so the
launches can be captured in a CUDA graph.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.cuda.attention import attend, combine
from decode_daemon.engine.cuda.buckets import MAX_WIDTH, Bucket, power_of_two
from decode_daemon.engine.cuda.ends import advance, embed
from decode_daemon.engine.cuda.join import Join
from decode_daemon.engine.cuda.multiply import Multiplier, NextNorm, Product
from decode_daemon.engine.cuda.plan import Plan
from decode_daemon.engine.cuda.products import SLOTS
from decode_daemon.engine.cuda.quantized import QuantizedLayer, QuantizedWeights
from decode_daemon.engine.model import empty_cache, rope_tables
from decode_daemon.engine.weights import LayerWeights, Weights

NO_PEAK = -(2**63)  # below every (logit, id)
_ATTENTION_ROWS = 16  # the fewest a tensor core takes
_JOINED = 2048  # elements of the splits that one warp of `combine` holds
_PLAN = Plan()


class Step:
    """Weights, cache and buffers on one device, and the launches of a step.

    Before a step `ids` (int64 [8]) holds its tokens and `state` (int32 [2]) the position of the first and how many there are.
    After it `logits` ([8, vocab]) and `best` (int64 [8], see `advance`) hold a row for each; the first of `ids` is then the
    last row's best id, and `state` the position after it: a step of one row needs nothing more to be followed by the next.
    """

    def __init__(
        self,
        config: LlamaConfig,
        weights: Weights | QuantizedWeights,
        context_tokens: int,
        splits: int,
        multiplier: Multiplier,
        *,
        overlap: bool,
        plan: Plan = _PLAN,
        join: Join | None = None,
    ) -> None:
        """Allocate for contexts of `context_tokens` in at most `splits` splits, on the device of `weights`.

        `weights` are those that `multiplier` packed; a head that is the embedding was packed once, as the head.
        `overlap` lets a kernel start, and load its first weights, while the one before it ends (programmatic dependent launch).
        With `join`, `config` and `weights` are one rank's part; `logits` are of its ids, but `best` of all ranks'.
        """
        self.config, self.weights, self.context_tokens = config, weights, context_tokens
        device, dtype = weights.embedding.device, weights.embedding.dtype
        heads, dim, half = config.heads, config.head_dim, config.head_dim // 2
        cos, sin = rope_tables(config, context_tokens)
        # The second halves repeat the first; the first half of sin carries the sign that `rotate_` wants.
        self._cos, self._sin = (table.to(device, dtype).contiguous() for table in (cos[:, :half], sin[:, half:]))
        self.join, self._kept = join, config.kv_heads if join is None else join.cached_heads
        self.cache = empty_cache(replace(config, kv_heads=self._kept), dtype, device, context_tokens)
        self.ids = torch.zeros(MAX_WIDTH, dtype=torch.int64, device=device)
        self.state = torch.zeros(2, dtype=torch.int32, device=device)
        self.best = torch.zeros(MAX_WIDTH, dtype=torch.int64, device=device)
        self._peaks = torch.full((MAX_WIDTH, SLOTS), NO_PEAK, dtype=torch.int64, device=device)

        def rows(size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(MAX_WIDTH, size, dtype=dtype, device=device)

        self._x = rows(config.hidden)
        self._qkv = rows((heads + 2 * config.kv_heads) * dim)
        self._attended = rows(heads * dim, multiplier.x_dtype)
        self._inner = rows(config.intermediate)
        self.logits = rows(config.vocab_size)
        self._partial = rows(heads * splits * dim, torch.float32)
        self._split_peaks, self._split_masses = rows(heads * splits, torch.float32), rows(heads * splits, torch.float32)
        self._scaled = rows(config.hidden, multiplier.x_dtype)
        self._squares = torch.zeros(2 * config.layers + 1, MAX_WIDTH, dtype=torch.int64, device=device)
        self.multiplier, self._overlap, self._plan = multiplier, overlap, plan

    def launch(self, width: int, bucket: Bucket) -> None:
        """Queue a step of up to `width` (1, 2, 4 or 8) rows whose positions lie in `bucket`."""
        self._compute(width, bucket)
        if self.join is not None:
            self.join.advance(width, self.best, self.ids, self.state, self._peaks)
            return
        launched = advance[(1,)](self.best, self.ids, self.state, self._peaks, width, SLOTS, self._overlap, **self._options())
        self.multiplier.beside(launched)

    def _compute(self, width: int, bucket: Bucket) -> None:
        config, weights = self.config, self.weights
        layers: Sequence[LayerWeights | QuantizedLayer] = weights.layers
        norms = self._squares.shape[0]
        lines, columns = self.multiplier.cut(config.vocab_size) if weights.embedding is weights.head else (0, 0)
        launched = embed[(width,)](
            *(self._x, self._scaled, self._squares, self.ids, weights.embedding, layers[0].input_norm),
            norms=norms,
            hidden=config.hidden,
            block=power_of_two(max(config.hidden, norms)),
            overlap=self._overlap,
            lines=lines,
            columns=columns,
            num_warps=8,
        )
        self.multiplier.beside(launched)
        gains = [layer.input_norm for layer in layers[1:]] + [weights.final_norm]
        for nth, (layer, cache, gain) in enumerate(zip(layers, self.cache, gains, strict=True)):
            attention, inner, following = self._squares[2 * nth : 2 * nth + 3]
            self._multiply(width, Product(self._qkv, self._scaled, layer.qkv, attention, bias=layer.qkv_bias))
            self.attend(width, layer, cache, bucket)
            norm = NextNorm(layer.post_norm, self._scaled, inner)
            self._multiply(width, Product(self._x, self._attended, layer.output, next_norm=norm))
            self._multiply(width, Product(self._inner, self._scaled, layer.gate_up, inner, gated=True))
            norm = NextNorm(gain, self._scaled, following)
            self._multiply(width, Product(self._x, self._inner, layer.down, next_norm=norm))
        self._multiply(width, Product(self.logits, self._scaled, weights.head, self._squares[-1], peaks=self._peaks))

    def _multiply(self, width: int, product: Product) -> None:
        """Queue a product; what it adds to the rows are all ranks' parts, where there are several."""
        norm = product.next_norm
        if self.join is None or norm is None:
            self.multiplier.queue(width, product)
        else:
            self.multiplier.queue(width, replace(product, out=self.join.part, next_norm=None))
            self.join.add(width, self._x, self._scaled, (norm.gain, norm.squares))

    def attend(self, width: int, layer: LayerWeights | QuantizedLayer, cache: torch.Tensor, bucket: Bucket) -> None:
        """Queue attention of the rows in `_qkv` over one layer's `cache`, which gets their K and V, into `_attended`."""
        config = self.config
        heads, kv_heads, dim = config.heads, config.kv_heads, config.head_dim
        splits = self._partial, self._split_peaks, self._split_masses
        blocks = -(-width * heads // kv_heads // _ATTENTION_ROWS)
        launched = attend[(bucket.splits, kv_heads, blocks)](
            *splits,
            *(self._qkv, cache, self._cos, self._sin, layer.q_norm, layer.k_norm, self.state),
            math.log2(math.e) / math.sqrt(dim),
            config.rms_eps,
            self.context_tokens,
            bucket.splits,
            bucket.chunk,
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            rows=_ATTENTION_ROWS,
            tile=bucket.tile,
            stages=self._plan.attention.stages,
            kept=self._kept,
            normed=layer.q_norm is not None,
            overlap=self._overlap,
            **self._options(self._plan.attention.warps),
        )
        self.multiplier.beside(launched)
        launched = combine[(heads, width)](
            *(self._attended, *splits, self.state, bucket.chunk),
            heads=heads,
            dim=dim,
            splits=bucket.splits,
            overlap=self._overlap,
            **self._options(max(4, bucket.splits * dim // _JOINED)),
        )
        self.multiplier.beside(launched)

    def _options(self, warps: int = 4) -> dict[str, Any]:
        """Return how a kernel is launched; what Triton's interpreter does not know is left out where nothing overlaps."""
        return {"num_warps": warps, "enable_fp_fusion": True} | ({"launch_pdl": True} if self._overlap else {})
