"""Which rank writes which heads, as vLLM divides them, and what is refused when vLLM starts."""

from types import SimpleNamespace
from typing import Any

import pytest

from connector.shards import Shard, require_whole_layers, shard_of
from handoff.layout import IndexBlock, KVLayout, LatentBlock, Layer, LayoutError, contiguous_block, uniform


def heads(count: int) -> KVLayout:
    """One rank's cache of so many heads."""
    block = contiguous_block(
        kv_heads=count, head_dim=8, block_tokens=4, dtype="bfloat16", order=("kind", "token", "head", "dim")
    )
    return uniform(["a", "b"], block)


def config(*, rank: int = 0, ranks: int = 1, total: int = 8, **sizes: int) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(rank=rank, tensor_parallel_size=ranks, **sizes),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: total),
    )


@pytest.mark.parametrize(
    ("total", "ranks", "shards"),
    [
        (8, 1, [(0, True)]),
        (8, 2, [(0, True), (1, True)]),
        (2, 4, [(0, True), (0, False), (1, True), (1, False)]),
        (1, 2, [(0, True), (0, False)]),
        (3, 3, [(0, True), (1, True), (2, True)]),
    ],
)
def test_heads_are_divided_among_ranks_in_order_and_written_once(
    total: int, ranks: int, shards: list[tuple[int, bool]]
) -> None:
    count = min(total, ranks)
    found = [shard_of(config(rank=rank, ranks=ranks, total=total), heads(max(1, total // ranks))) for rank in range(ranks)]
    assert found == [Shard(index, count, writes) for index, writes in shards]


@pytest.mark.parametrize("block", [LatentBlock(64), LatentBlock(64, form="fp8_ds_mla"), IndexBlock(64)])
def test_what_every_rank_holds_whole_is_written_by_the_first(block: LatentBlock | IndexBlock) -> None:
    layout = uniform(["a", "b"], block)
    found = [shard_of(config(rank=rank, ranks=4, total=1), layout) for rank in range(4)]
    assert found == [Shard(0, 1, writes=rank == 0) for rank in range(4)]


@pytest.mark.parametrize(("per_rank", "total", "ranks"), [(4, 8, 4), (3, 8, 3), (1, 2, 3)])
def test_heads_that_are_divided_otherwise_are_refused(per_rank: int, total: int, ranks: int) -> None:
    with pytest.raises(LayoutError, match=rf"layer a has {per_rank} KV heads on this rank: .* {total} among {ranks} ranks"):
        shard_of(config(ranks=ranks, total=total), heads(per_rank))


def test_a_cache_that_is_only_partly_divided_is_refused() -> None:
    layout = KVLayout((Layer("a", 0), Layer("latent", 1)), (*heads(4).blocks, LatentBlock(4)))
    with pytest.raises(LayoutError, match="layer latent is whole on every rank and others are divided by heads"):
        shard_of(config(ranks=2), layout)


@pytest.mark.parametrize("name", ["pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"])
def test_a_cache_divided_by_layers_or_tokens_is_refused_by_the_options_name(name: str) -> None:
    require_whole_layers(config(**{name: 1}))
    with pytest.raises(LayoutError, match=f"--{name.replace('_', '-')} is 2: .*; use 1"):
        require_whole_layers(config(**{name: 2}))


def test_vllms_own_configuration_has_these_options() -> None:
    from vllm.config import ParallelConfig

    parallel = ParallelConfig()
    assert (parallel.pipeline_parallel_size, parallel.prefill_context_parallel_size) == (1, 1)
    assert (parallel.decode_context_parallel_size, parallel.tensor_parallel_size, parallel.rank) == (1, 1, 0)
    assert parallel.use_ubatching is False


def test_a_cache_that_vllm_may_take_back_is_refused() -> None:
    sleepy = config()
    sleepy.model_config.enable_sleep_mode = True
    with pytest.raises(LayoutError, match="--enable-sleep-mode"):
        require_whole_layers(sleepy)
