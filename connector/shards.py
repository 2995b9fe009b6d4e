"""Which part of a KV cache this rank holds, and whether it is the one that writes it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from handoff.layout import GqaBlock, KVLayout, LayoutError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_UNSUPPORTED = {
    "pipeline_parallel_size": "--pipeline-parallel-size",
    "prefill_context_parallel_size": "--prefill-context-parallel-size",
    "decode_context_parallel_size": "--decode-context-parallel-size",
}


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's part: shard `index` of `count`, in the order of the heads. Of ranks that hold the same one, one `writes`."""

    index: int
    count: int
    writes: bool


def require_whole_layers(config: "VllmConfig") -> None:
    """Raise LayoutError, naming the option, where ranks divide a prompt's KV otherwise than by heads, or its memory may go."""
    parallel = config.parallel_config
    for name, option in _UNSUPPORTED.items():
        size = getattr(parallel, name, 1)
        if size > 1:
            raise LayoutError(f"{option} is {size}: a KV cache divided by layers or by tokens is not handed over; use 1")
    # Before 0.33 vLLM does not ask the connector for it.
    if getattr(config.model_config, "enable_sleep_mode", False):
        raise LayoutError("--enable-sleep-mode takes back the memory that a KV cache is sent from: start vLLM without it")


def shard_of(config: "VllmConfig", layout: KVLayout) -> Shard:
    """Return this rank's part of the cache.

    vLLM gives each tensor-parallel rank its share of the KV heads, in order; where there are fewer heads than ranks, each head
    to as many neighbouring ranks. Latent and index caches are whole on every rank. Raises LayoutError for caches that are
    divided in another way.
    """
    rank, ranks = config.parallel_config.rank, config.parallel_config.tensor_parallel_size
    if layout.replicated:
        return Shard(0, 1, writes=rank == 0)
    heads = config.model_config.get_total_num_kv_heads()
    shards = min(ranks, heads)
    same = ranks // shards
    for layer in layout.layers:
        block = layout.blocks[layer.block]
        if not isinstance(block, GqaBlock):
            raise LayoutError(f"layer {layer.name} is whole on every rank and others are divided by heads: not handed over")
        if block.kv_heads * shards != heads or same * shards != ranks:
            raise LayoutError(
                f"layer {layer.name} has {block.kv_heads} KV heads on this rank: not its share of {heads} among {ranks} ranks"
            )
    return Shard(rank // same, shards, writes=rank % same == 0)
