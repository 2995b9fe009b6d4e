# mypy: disable-error-code="import-untyped"
"""How ranks share a model: which part is whose, what cannot be shared, and that nobody has to find out late."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decode_daemon.engine.cuda.shards import Shard, assembled, check_divisible, named
from decode_daemon.engine.loop import LlamaEngine
from decode_daemon.engine.protocol import EngineError
from decode_daemon.engine.steps import choose_step
from decode_daemon.engine.weights import Weights
from tests.unit.engine.test_engine_cuda_step import PLAIN, ptx, random_weights

pytest.importorskip("triton")

MODEL = replace(PLAIN, heads=8, kv_heads=4, qkv_bias=True)


def shared(weights: Weights, ranks: int, config: Any = MODEL) -> list[tuple[Shard, Weights]]:
    shards = [Shard(rank, ranks, config) for rank in range(ranks)]
    return [
        (shard, assembled({(layer, field): shard.cut(field, whole) for layer, field, whole in named(weights)}, shard))
        for shard in shards
    ]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_head_with_its_keys_and_values_is_one_ranks(ranks: int) -> None:
    weights = random_weights(MODEL)
    for shard, part in shared(weights, ranks):
        assert part.layers[1].qkv_bias is not None
        for found, whole in zip(by_kind(part.layers[1].qkv, ranks), by_kind(weights.layers[1].qkv, 1), strict=True):
            assert torch.equal(found, whole.chunk(ranks)[shard.rank])


def by_kind(qkv: torch.Tensor, ranks: int) -> tuple[torch.Tensor, ...]:
    """Return the rows of queries, keys and values of one of `ranks`."""
    return torch.split(qkv, [heads * MODEL.head_dim // ranks for heads in (8, 4, 4)])


@pytest.mark.parametrize("ranks", [2, 4])
def test_partial_products_add_up_and_the_others_stand_side_by_side(ranks: int) -> None:
    weights = random_weights(MODEL)
    layer, parts = weights.layers[0], shared(weights, ranks)
    attended, inner, x = torch.rand(128), torch.rand(24), torch.rand(16)
    sums = sum(part.layers[0].output @ attended.chunk(ranks)[shard.rank] for shard, part in parts)
    torch.testing.assert_close(sums, layer.output @ attended)
    sums = sum(part.layers[0].down @ inner.chunk(ranks)[shard.rank] for shard, part in parts)
    torch.testing.assert_close(sums, layer.down @ inner)
    gates, ups = zip(*((part.layers[0].gate_up @ x).chunk(2) for _, part in parts), strict=True)
    torch.testing.assert_close(torch.cat([*gates, *ups]), layer.gate_up @ x)
    logits = [part.head @ x for _, part in parts]
    assert [len(own) for own in logits] == [shard.config.vocab_size for shard, _ in parts]
    torch.testing.assert_close(torch.cat(logits), weights.head @ x)


def test_a_part_keeps_nothing_of_the_whole_in_memory_but_a_tied_head_its_embedding() -> None:
    weights = random_weights(replace(MODEL, tied=True))
    _, part = shared(weights, 2)[1]
    assert part.head.data_ptr() == part.embedding[19:].data_ptr()
    cut = (part.layers[0].qkv, part.layers[0].output, part.layers[0].gate_up, part.layers[0].down)
    assert all(one.is_contiguous() and one.untyped_storage().nbytes() == one.nbytes for one in cut)


@pytest.mark.parametrize(
    ("changed", "ranks", "named"),
    [
        ({"kv_heads": 2}, 4, r"does not divide the model's kv_heads \(2\)"),
        ({"heads": 9, "kv_heads": 3, "intermediate": 25}, 3, r"does not divide the model's intermediate \(25\)"),
        ({"vocab_size": 5}, 4, "too many for a vocabulary of 5"),
    ],
)
def test_what_ranks_cannot_share_is_named(changed: dict[str, Any], ranks: int, named: str) -> None:
    with pytest.raises(EngineError, match=f"tensor_parallel is {ranks}.*{named}"):
        check_divisible(replace(MODEL, **changed), ranks)


@pytest.mark.parametrize("vocab", [128256, 151936, 49152, 32001])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_id_has_one_rank(vocab: int, ranks: int) -> None:
    config = replace(MODEL, heads=8, kv_heads=8, vocab_size=vocab)
    check_divisible(config, ranks)
    ids = [shard.ids for shard in (Shard(rank, ranks, config) for rank in range(ranks))]
    assert [each.start for each in ids] == [0, *(each.stop for each in ids[:-1])]
    assert ids[-1].stop == vocab


def test_a_number_of_gpus_that_cannot_be_is_refused_before_weights_are_read(tiny: Callable[..., tuple[Path, Any]]) -> None:
    folder, _ = tiny()
    (folder / "model.safetensors").unlink()
    with pytest.raises(EngineError, match=r"tensor_parallel is 4, which does not divide the model's kv_heads \(2\)"):
        LlamaEngine.load(folder, dtype=torch.bfloat16, context_tokens=64, threads=None, tensor_parallel=4)


def test_only_the_cuda_step_is_computed_by_several(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = random_weights(MODEL)
    with pytest.raises(EngineError, match="tensor_parallel is 2, which only the CUDA step can"):
        choose_step(MODEL, weights, 64, step="torch", tensor_parallel=2)
    with pytest.raises(EngineError, match="the CUDA step is not possible here: PyTorch sees no CUDA device"):
        choose_step(MODEL, weights, 64, tensor_parallel=2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(EngineError, match="tensor_parallel is 2, and PyTorch sees 1 CUDA devices"):
        choose_step(MODEL, weights, 64, tensor_parallel=2)


def test_joining_kernels_compile_for_hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from decode_daemon.engine.cuda.join import add_parts, advance_joined

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    pointers = {"x": "bf16", "parts": "fp32", "scaled": "fp32", "gain": "bf16", "squares": "i64"}
    code = ptx(add_parts, pointers, {}, {"ranks": 2, "width": 4, "hidden": 4096, "block": 512, "overlap": True})
    assert "griddepcontrol.launch_dependents" in code
    pointers = {"best": "i64", "ids": "i64", "state": "i32", "peaks": "i64", "gathered": "i64"}
    assert ptx(advance_joined, pointers, {}, {"ranks": 2, "most_ids": 64128, "width": 8, "slots": 64})
