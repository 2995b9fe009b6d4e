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
from decode_daemon.engine.cuda.plan import Plan
from decode_daemon.engine.cuda.products import SLOTS, product
from decode_daemon.engine.cuda.quantized import Quantized, QuantizedLayer, QuantizedWeights
from decode_daemon.engine.cuda.tiles import tile_for
from decode_daemon.engine.model import empty_cache, rope_tables
from decode_daemon.engine.weights import LayerWeights, Weights

NO_PEAK = -(2**63)  # below every (logit, id)
_EMBED_BLOCK = 1024
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
        *,
        overlap: bool,
        plan: Plan = _PLAN,
        join: Join | None = None,
    ) -> None:
        """Allocate for contexts of `context_tokens` in at most `splits` splits, on the device of `weights`.

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
        self._attended = rows(heads * dim, torch.float32)
        self._inner = rows(config.intermediate)
        self.logits = rows(config.vocab_size)
        self._partial = rows(heads * splits * dim, torch.float32)
        self._split_peaks, self._split_masses = rows(heads * splits, torch.float32), rows(heads * splits, torch.float32)
        self._scaled = rows(config.hidden, torch.float32)
        self._squares = torch.zeros(2 * config.layers + 1, MAX_WIDTH, dtype=torch.int64, device=device)
        self._overlap, self._plan = overlap, plan

    def launch(self, width: int, bucket: Bucket) -> None:
        """Queue a step of up to `width` (1, 2, 4 or 8) rows whose positions lie in `bucket`."""
        self._compute(width, bucket)
        if self.join is not None:
            self.join.advance(width, self.best, self.ids, self.state, self._peaks)
            return
        advance[(1,)](self.best, self.ids, self.state, self._peaks, width, SLOTS, self._overlap, **self._options())

    def _compute(self, width: int, bucket: Bucket) -> None:
        config, final = self.config, self.weights.final_norm
        layers: Sequence[LayerWeights | QuantizedLayer] = self.weights.layers
        norms = self._squares.shape[0]
        embed[(width,)](
            *(self._x, self._scaled, self._squares, self.ids, self.weights.embedding, layers[0].input_norm),
            norms=norms,
            hidden=config.hidden,
            block=power_of_two(max(config.hidden, norms)),
            overlap=self._overlap,
            num_warps=8,
        )
        gains = [layer.input_norm for layer in layers[1:]] + [final]
        for nth, (layer, cache, gain) in enumerate(zip(layers, self.cache, gains, strict=True)):
            attention, inner, following = self._squares[2 * nth : 2 * nth + 3]
            self._product(width, self._qkv, self._scaled, layer.qkv, attention, bias=layer.qkv_bias)
            self.attend(width, layer, cache, bucket)
            self._add(width, self._attended, layer.output, (layer.post_norm, inner))
            self._product(width, self._inner, self._scaled, layer.gate_up, inner, gated=True)
            self._add(width, self._inner, layer.down, (gain, following))
        self._product(width, self.logits, self._scaled, self.weights.head, self._squares[-1], peaks=self._peaks)

    def _add(
        self, width: int, x: torch.Tensor, weight: torch.Tensor | Quantized, next_norm: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Queue: add the product of `x` to the rows, all ranks' parts of it where there are several; see `_product`."""
        if self.join is None:
            self._product(width, self._x, x, weight, next_norm=next_norm)
        else:
            self._product(width, self.join.part, x, weight)
            self.join.add(width, self._x, self._scaled, next_norm)

    def _product(
        self,
        width: int,
        out: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor | Quantized,
        squares: torch.Tensor | None = None,
        *,
        bias: torch.Tensor | None = None,
        next_norm: tuple[torch.Tensor, torch.Tensor] | None = None,
        peaks: torch.Tensor | None = None,
        gated: bool = False,
    ) -> None:
        """Queue one product; with `next_norm`, a gain and where squares go, it adds to `out` and prepares that norm."""
        inputs, outputs, added = x.shape[1], out.shape[1], next_norm is not None
        values, factors = (weight.values, weight.scale) if isinstance(weight, Quantized) else (weight, None)
        tile = self._plan.tiles.get((inputs, values.shape[0])) or tile_for(
            inputs, outputs, gated=gated, element_bytes=values.element_size()
        )
        gain, next_squares = next_norm or (None, None)
        product[(-(-outputs // tile.rows),)](
            *(out, x, values, out if added else bias, squares, gain, self._scaled, next_squares, peaks),
            self.config.rms_eps,
            inputs=inputs,
            outputs=outputs,
            width=width,
            rows=tile.rows,
            columns=tile.columns,
            depth=tile.depth,
            normed=squares is not None,
            gated=gated,
            biased=bias is not None,
            residual=added,
            peaked=peaks is not None,
            slots=SLOTS,
            overlap=self._overlap,
            factors=factors,
            **self._options(tile.warps),
        )

    def attend(self, width: int, layer: LayerWeights | QuantizedLayer, cache: torch.Tensor, bucket: Bucket) -> None:
        """Queue attention of the rows in `_qkv` over one layer's `cache`, which gets their K and V, into `_attended`."""
        config = self.config
        heads, kv_heads, dim = config.heads, config.kv_heads, config.head_dim
        splits = self._partial, self._split_peaks, self._split_masses
        blocks = -(-width * heads // kv_heads // _ATTENTION_ROWS)
        attend[(bucket.splits, kv_heads, blocks)](
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
        combine[(heads, width)](
            *(self._attended, *splits, self.state, bucket.chunk),
            heads=heads,
            dim=dim,
            splits=bucket.splits,
            overlap=self._overlap,
            **self._options(max(4, bucket.splits * dim // _JOINED)),
        )

    def _options(self, warps: int = 4) -> dict[str, Any]:
        """Return how a kernel is launched; what Triton's interpreter does not know is left out where nothing overlaps."""
        return {"num_warps": warps, "enable_fp_fusion": True} | ({"launch_pdl": True} if self._overlap else {})
