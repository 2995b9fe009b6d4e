# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"
# Kernels are Triton's language, not Python's: their arguments are pointers and tensors that mypy has no types for.
"""What ranks compute apart, joined on each of them: partial sums added in the order of the ranks, and the largest logit of all.

An all-reduce adds in an order that depends on the size of what is added and on the place in it, so a row's bits would depend
on the width of its step. Here ranks only copy each other's sums, in float32, and one kernel adds them: the same numbers in the
same order whatever the width, rounded once as the sum of a single GPU is. A row is a few kilobytes: what a gather costs is its
latency, and bfloat16 would not be sooner.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from decode_daemon.engine.cuda.buckets import MAX_WIDTH
from decode_daemon.engine.cuda.group import Group
from decode_daemon.engine.cuda.products import SLOTS, counted
from decode_daemon.engine.cuda.shards import Shard

_BLOCK = 512  # of a row, in one program


class Join:
    """One rank's buffers of what is gathered, and the launches that gather and join it on the current stream."""

    def __init__(self, group: Group, shard: Shard, *, overlap: bool) -> None:
        """Allocate on the group's device. `overlap` as in `Step`."""
        device, hidden = group.device, shard.whole.hidden
        self.shard = shard
        self.part = torch.zeros(MAX_WIDTH, hidden, dtype=torch.float32, device=device)  # this rank's sums of a product
        self._group, self._overlap = group, overlap
        self._parts = torch.zeros(group.ranks * MAX_WIDTH, hidden, dtype=torch.float32, device=device)
        self._peaks = torch.zeros(group.ranks * MAX_WIDTH, SLOTS, dtype=torch.int64, device=device)

    @property
    def cached_heads(self) -> int:
        """KV heads of this rank's cache: on rank 0 all of them, where KV lands for every rank; its own are the first."""
        return self.shard.whole.kv_heads if self.shard.rank == 0 else self.shard.config.kv_heads

    def add(self, width: int, x: torch.Tensor, scaled: torch.Tensor, next_norm: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Queue: add every rank's `part` to `width` rows of `x`, and prepare the next norm: its gain, and where squares go."""
        gathered = self._parts[: self._group.ranks * width]
        self._group.gather(gathered, self.part[:width])
        hidden = x.shape[1]
        add_parts[(width, -(-hidden // _BLOCK))](
            *(x, gathered, scaled, *next_norm),
            ranks=self._group.ranks,
            width=width,
            hidden=hidden,
            block=_BLOCK,
            overlap=self._overlap,
            num_warps=4,  # and no early launch: a collective does not let its successor begin before it ends
        )

    def advance(self, width: int, best: torch.Tensor, ids: torch.Tensor, state: torch.Tensor, peaks: torch.Tensor) -> None:
        """Queue what `ends.advance` does, of all ranks' `peaks`."""
        gathered = self._peaks[: self._group.ranks * width]
        self._group.gather(gathered, peaks[:width])
        advance_joined[(1,)](
            *(best, ids, state, peaks, gathered),
            ranks=self._group.ranks,
            most_ids=self.shard.most_ids,
            width=width,
            slots=SLOTS,
            num_warps=4,
        )

    def logits(self, own: torch.Tensor) -> torch.Tensor:
        """Queue: gather rows of logits, [width, this rank's ids], on every rank; return them whole, [width, vocab]."""
        width, most = own.shape[0], self.shard.most_ids
        part = torch.nn.functional.pad(own, (0, most - own.shape[1])).contiguous()
        whole = part.new_empty(self._group.ranks * width, most)
        self._group.gather(whole, part)
        rows = whole.view(self._group.ranks, width, most).transpose(0, 1).reshape(width, -1)
        return rows[:, : self.shard.whole.vocab_size].contiguous()


@triton.jit
def add_parts(
    x,  # [8, hidden]
    parts,  # float32 [ranks, width, hidden]
    scaled,  # float32 [8, hidden]: x * gain
    gain,  # [hidden], of the norm that follows
    squares,  # int64 [8]: gets the sums of squares of `x`
    ranks: tl.constexpr,
    width: tl.constexpr,
    hidden: tl.constexpr,
    block: tl.constexpr,
    overlap: tl.constexpr,
):
    """Add the ranks' parts, in their order, and then the residual, as `product` does; grid (width, hidden / block)."""
    if overlap:
        gdc_launch_dependents()
    row = tl.program_id(0)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < hidden
    place = row * hidden + at
    total = tl.load(parts + place, mask=inside, other=0.0)
    for rank in tl.static_range(1, ranks):
        total += tl.load(parts + rank * width * hidden + place, mask=inside, other=0.0)
    total += tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    y = total.to(x.dtype.element_ty)
    tl.store(x + place, y, mask=inside)
    y = y.to(tl.float32)
    gains = tl.load(gain + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(scaled + place, (y * gains).to(scaled.dtype.element_ty), mask=inside)
    tl.atomic_add(squares + row, tl.sum(counted(y), axis=0), sem="relaxed")


@triton.jit
def advance_joined(
    best,
    ids,
    state,
    peaks,  # int64 [8, slots]: this rank's, which are cleared
    gathered,  # int64 [ranks, width, slots]
    ranks: tl.constexpr,
    most_ids: tl.constexpr,  # of every rank but the last
    width: tl.constexpr,
    slots: tl.constexpr,
):
    """As `ends.advance`; the ids in `gathered` count from each rank's first."""
    r = tl.arange(0, width)
    place = r[:, None] * slots + tl.arange(0, slots)[None, :]
    none = tl.full((width, slots), -(2**63), tl.int64)
    found = none
    for rank in tl.static_range(ranks):
        words = tl.load(gathered + rank * width * slots + place)
        # The low word counts ids downwards.
        found = tl.maximum(found, tl.where(words == none, none, words - rank * most_ids))
    top = tl.max(found, axis=1)
    tl.store(peaks + place, none)
    chosen = tl.where((top >> 32) == 0x7FFFFFFF, -1, 0x7FFFFFFF - (top & 0xFFFFFFFF))
    tl.store(best + r, chosen)
    rows = tl.load(state + 1)
    tl.store(ids + tl.zeros((width,), tl.int32), tl.maximum(chosen, 0), mask=r == rows - 1)
    tl.store(state, tl.load(state) + rows)
