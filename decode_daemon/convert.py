"""From vLLM's blocks of grouped-query attention, as they landed, to the engine's cache.

On CPUs strided copies of PyTorch's, on GPUs one gathering kernel (see `convert_cuda`); both give the same bits.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby

import torch

from handoff.layout import Digit, GqaBlock, KindLayout, KVLayout, LayoutError

_PAIRS = {2: torch.int32, 4: torch.int64}  # by the bytes of one element


@dataclass(frozen=True, slots=True)
class Run:
    """Layers that follow one another with the same block, of one shard, and the part of the engine's cache that they fill."""

    block: GqaBlock
    landed: torch.Tensor  # uint8, the layers' blocks and nothing else
    keys: torch.Tensor  # [layers, kv_heads of the shard, tokens, head_dim]
    values: torch.Tensor
    key_scales: tuple[float | None, ...]  # one a layer
    value_scales: tuple[float | None, ...]

    @property
    def kinds(self) -> tuple[tuple[KindLayout, torch.Tensor, torch.Tensor | None], ...]:
        """Return keys and values: where they lie in a block, where they go, and their scales (float32, [layers])."""
        device = self.keys.device
        return (
            (self.block.keys, self.keys, _tensor(self.key_scales, device)),
            (self.block.values, self.values, _tensor(self.value_scales, device)),
        )


def convert(landed: torch.Tensor, layout: KVLayout, keys: torch.Tensor, values: torch.Tensor, *, shards: int = 1) -> None:
    """Copy a prompt's KV into the engine's cache; when it returns, `landed` has been read.

    landed: uint8, shard after shard, each of `layout.bytes_for(tokens)` bytes, layer after layer.
    keys, values: [layers, kv_heads of all shards, tokens, head_dim]; shard s fills heads s * h to (s + 1) * h.
    fp8 becomes the dtype of `keys` and `values`, multiplied by its layer's scale in float32; other dtypes must be theirs.
    Raises LayoutError for a layer of another kind of attention.
    """
    copy: Callable[[Run], None] = _strided
    if keys.is_cuda:
        from decode_daemon import convert_cuda  # Triton is installed only where there is a GPU

        copy = convert_cuda.gather
        # A transport that landed KV by copies of this process made them on streams of its own.
        torch.cuda.synchronize(keys.device)
        landed = convert_cuda.reachable(landed, keys.device)
    try:
        for run in runs(landed, layout, keys, values, shards):
            copy(run)
    finally:
        if keys.is_cuda:
            torch.cuda.current_stream(keys.device).synchronize()


def runs(landed: torch.Tensor, layout: KVLayout, keys: torch.Tensor, values: torch.Tensor, shards: int) -> Iterator[Run]:
    """Split a landing region, and the cache that it goes to, into parts that one strided copy can take; see `convert`."""
    tokens = keys.shape[2]
    bounds = (*layout.offsets(tokens), layout.bytes_for(tokens))
    for shard in range(shards):
        part = landed[shard * bounds[-1] : (shard + 1) * bounds[-1]]
        for _, group in groupby(range(len(layout.layers)), key=lambda index: layout.layers[index].block):
            first, *others = group
            last = others[-1] if others else first
            layers, block = layout.layers[first : last + 1], layout.block(first)
            if not isinstance(block, GqaBlock):
                raise LayoutError(f"layer {layers[0].name!r} is no grouped-query attention: it has no heads' keys and values")
            heads = slice(shard * block.kv_heads, (shard + 1) * block.kv_heads)
            yield Run(
                block,
                part[bounds[first] : bounds[last + 1]],
                keys[first : last + 1, heads],
                values[first : last + 1, heads],
                tuple(layer.key_scale for layer in layers),
                tuple(layer.value_scale for layer in layers),
            )


def _tensor(scales: tuple[float | None, ...], device: torch.device) -> torch.Tensor | None:
    known = [scale for scale in scales if scale is not None]
    return torch.tensor(known, dtype=torch.float32, device=device) if known else None


def _strided(run: Run) -> None:
    block, tokens = run.block, run.keys.shape[2]
    full, rest = divmod(tokens, block.block_tokens)
    split = full * block.block_tokens
    for kind, target, scales in run.kinds:
        source, axis = _blocks(run, kind), 1 + len(kind.head)
        if full:
            _copy(_in_digits(target[:, :, :split], full, kind), source.narrow(axis, 0, full), scales)
        if rest:  # some tokens of a block are no whole digits of it: the whole block is joined, and cut
            last = source.select(axis, full).reshape(-1, block.kv_heads, block.block_tokens, block.head_dim)
            _copy(target[:, :, split:], last[:, :, :rest], scales)


def _copy(target: torch.Tensor, source: torch.Tensor, scales: torch.Tensor | None) -> None:
    if scales is not None:
        target.copy_(source.to(torch.float32) * scales.reshape(-1, *(1,) * (source.dim() - 1)))
    elif source.dtype == target.dtype and _of_pairs(source) and _of_pairs(target):
        # Matrix units want keys in pairs of dims: moved as one element, they take a quarter of the time.
        wide = _PAIRS[source.element_size()]
        target.view(wide).copy_(source.view(wide))
    else:
        target.copy_(source)


def _of_pairs(tensor: torch.Tensor) -> bool:
    """Whether elements lie two by two wherever the innermost axis goes."""
    even = all(number % 2 == 0 for number in (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1]))
    return even and tensor.stride(-1) == 1 and tensor.element_size() in _PAIRS


def _blocks(run: Run, kind: KindLayout) -> torch.Tensor:
    """View one kind of every block: [layers, head digits..., blocks, token digits..., dim digits...]."""
    dtype: torch.dtype = getattr(torch, run.block.dtype)
    elements, layers = run.landed.view(dtype), run.keys.shape[0]
    of_layer = elements.numel() // layers
    blocks = Digit(of_layer // run.block.elements, run.block.elements)
    digits = [Digit(layers, of_layer), *kind.head, blocks, *kind.token, *kind.dim]
    return elements.as_strided(
        [digit.size for digit in digits],
        [digit.stride for digit in digits],
        storage_offset=elements.storage_offset() + kind.offset,
    )


def _in_digits(target: torch.Tensor, blocks: int, kind: KindLayout) -> torch.Tensor:
    """View [layers, kv_heads, tokens of whole blocks, head_dim] as `_blocks` does, so that one copy does without another."""
    for axis, digits in ((3, kind.dim), (2, (Digit(blocks, 0), *kind.token)), (1, kind.head)):
        target = target.unflatten(axis, [digit.size for digit in digits])  # type: ignore[no-untyped-call]
    return target
