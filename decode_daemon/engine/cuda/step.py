"""One step of a Llama-family decoder as launches on the current stream, from ids in device memory to ids in device memory.

Six kernels a layer: QKV product (with the norm before it), attention, its splits joined, output product (with the residual
after it), gate and up product (norm before, SiLU * up after it), down product (residual). Every buffer is allocated once, so
the launches can be captured in a CUDA graph. With another plan than the usual the kernel before a norm prepares it.
"""

import math
from typing import Any

import torch

from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.cuda.attention import attend, combine
from decode_daemon.engine.cuda.buckets import MAX_WIDTH, Bucket, power_of_two
from decode_daemon.engine.cuda.ends import advance, embed, embed_prepared
from decode_daemon.engine.cuda.plan import Plan
from decode_daemon.engine.cuda.prepared import prepared_product
from decode_daemon.engine.cuda.products import SLOTS, product
from decode_daemon.engine.cuda.tensor import tensor_product
from decode_daemon.engine.cuda.tiles import prepared_tile_for, tensor_tile_for, tile_for
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
        self, config: LlamaConfig, weights: Weights, context_tokens: int, splits: int, *, overlap: bool, plan: Plan = _PLAN
    ) -> None:
        """Allocate for contexts of `context_tokens` in at most `splits` splits, on the device of `weights`.

        `overlap` lets a kernel start, and load its first weights, while the one before it ends (programmatic dependent launch).
        """
        self.config, self.weights, self.context_tokens = config, weights, context_tokens
        device, dtype = weights.embedding.device, weights.embedding.dtype
        heads, dim, half = config.heads, config.head_dim, config.head_dim // 2
        cos, sin = rope_tables(config, context_tokens)
        # The second halves repeat the first; the first half of sin carries the sign that `rotate_` wants.
        self._cos, self._sin = (table.to(device, dtype).contiguous() for table in (cos[:, :half], sin[:, half:]))
        self.cache = empty_cache(config, dtype, device, context_tokens)
        self.ids = torch.zeros(MAX_WIDTH, dtype=torch.int64, device=device)
        self.state = torch.zeros(2, dtype=torch.int32, device=device)
        self.best = torch.zeros(MAX_WIDTH, dtype=torch.int64, device=device)
        self._peaks = torch.full((MAX_WIDTH, SLOTS), NO_PEAK, dtype=torch.int64, device=device)

        def rows(size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(MAX_WIDTH, size, dtype=dtype, device=device)

        self._x = rows(config.hidden)
        self._qkv = rows((heads + 2 * config.kv_heads) * dim)
        sums = torch.float32 if plan.products == "prepared" else dtype  # of what a product reads, where it is short
        self._attended = rows(heads * dim, sums)
        self._inner = rows(config.intermediate)
        self.logits = rows(config.vocab_size)
        self._partial = rows(heads * splits * dim, torch.float32)
        self._split_peaks, self._split_masses = rows(heads * splits, torch.float32), rows(heads * splits, torch.float32)
        self._scaled = rows(config.hidden, sums)
        self._squares = torch.zeros(2 * config.layers + 1, MAX_WIDTH, dtype=torch.int64, device=device)
        self._overlap, self._plan = overlap, plan

    def launch(self, width: int, bucket: Bucket) -> None:
        """Queue a step of up to `width` (1, 2, 4 or 8) rows whose positions lie in `bucket`."""
        if self._plan.products == "fused":
            self._launch(width, bucket)
        else:
            self._launch_prepared(width, bucket)
        advance[(1,)](self.best, self.ids, self.state, self._peaks, width, SLOTS, self._overlap, **self._options())

    def _launch(self, width: int, bucket: Bucket) -> None:
        config, weights = self.config, self.weights
        grid = width, -(-config.hidden // _EMBED_BLOCK)
        embed[grid](self._x, self.ids, weights.embedding, config.hidden, _EMBED_BLOCK, self._overlap)
        for layer, cache in zip(weights.layers, self.cache, strict=True):
            self._product(width, self._qkv, self._x, layer.qkv, gain=layer.input_norm, bias=layer.qkv_bias)
            self.attend(width, layer, cache, bucket)
            self._product(width, self._x, self._attended, layer.output, residual=self._x)
            self._product(width, self._inner, self._x, layer.gate_up, gain=layer.post_norm, gated=True)
            self._product(width, self._x, self._inner, layer.down, residual=self._x)
        self._product(width, self.logits, self._x, weights.head, gain=weights.final_norm, peaks=self._peaks)

    def _launch_prepared(self, width: int, bucket: Bucket) -> None:
        config, layers, final = self.config, self.weights.layers, self.weights.final_norm
        norms = self._squares.shape[0]
        embed_prepared[(width,)](
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
            self._prepared_product(width, self._qkv, self._scaled, layer.qkv, attention, bias=layer.qkv_bias)
            self.attend(width, layer, cache, bucket)
            self._prepared_product(width, self._x, self._attended, layer.output, next_norm=(layer.post_norm, inner))
            self._prepared_product(width, self._inner, self._scaled, layer.gate_up, inner, gated=True)
            self._prepared_product(width, self._x, self._inner, layer.down, next_norm=(gain, following))
        self._prepared_product(width, self.logits, self._scaled, self.weights.head, self._squares[-1], peaks=self._peaks)

    def _prepared_product(
        self,
        width: int,
        out: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        squares: torch.Tensor | None = None,
        *,
        bias: torch.Tensor | None = None,
        next_norm: tuple[torch.Tensor, torch.Tensor] | None = None,
        peaks: torch.Tensor | None = None,
        gated: bool = False,
    ) -> None:
        """Queue one product; with `next_norm`, a gain and where squares go, it adds to `out` and prepares that norm."""
        inputs, outputs, added = x.shape[1], out.shape[1], next_norm is not None
        tensor = self._plan.products == "tensor"
        usual = (tensor_tile_for if tensor else prepared_tile_for)(inputs, outputs, gated=gated)
        tile = self._plan.tiles.get((inputs, weight.shape[0]), usual)
        own = tile.rows // (2 if gated else 1) if tensor else tile.rows * tile.groups
        gain, next_squares = next_norm or (None, None)
        (tensor_product if tensor else prepared_product)[(-(-outputs // own),)](
            *(out, x, weight, out if added else bias, squares, gain, self._scaled, next_squares, peaks),
            self.config.rms_eps,
            inputs=inputs,
            outputs=outputs,
            width=width,
            rows=tile.rows,
            groups=tile.groups,
            columns=tile.columns,
            depth=tile.depth,
            normed=squares is not None,
            gated=gated,
            biased=bias is not None,
            residual=added,
            peaked=peaks is not None,
            slots=SLOTS,
            overlap=self._overlap,
            **self._options(tile.warps),
        )

    def _product(
        self,
        width: int,
        out: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        *,
        gain: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        peaks: torch.Tensor | None = None,
        gated: bool = False,
    ) -> None:
        inputs, outputs, added = x.shape[1], out.shape[1], residual is not None
        tile = tile_for(inputs, outputs, width, gated=gated, residual=added, element_bytes=x.element_size())
        product[(-(-outputs // tile.rows),)](
            *(out, x, weight, gain, residual if added else bias, peaks),
            self.config.rms_eps,
            inputs=inputs,
            outputs=outputs,
            width=width,
            rows=tile.rows,
            columns=tile.columns,
            vector=tile.vector,
            normed=gain is not None,
            gated=gated,
            biased=bias is not None,
            residual=added,
            peaked=peaks is not None,
            slots=SLOTS,
            overlap=self._overlap,
            **self._options(tile.warps),
        )

    def attend(self, width: int, layer: LayerWeights, cache: torch.Tensor, bucket: Bucket) -> None:
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
