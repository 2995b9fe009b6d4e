"""A checkpoint is taken whole and exact, or refused with the tensor's name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.protocol import EngineError
from decode_daemon.engine.weights import Weights, load_weights

Tiny = Callable[..., tuple[Path, Any]]
Tensors = dict[str, torch.Tensor]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Weights:
    return load_weights(folder, LlamaConfig.read(folder), dtype)


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_query_key_value_and_gate_up_are_stacked_in_order(tiny: Tiny) -> None:
    folder, reference = tiny()
    attention, mlp = reference.model.layers[1].self_attn, reference.model.layers[1].mlp
    layer = load(folder).layers[1]
    stacked = (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
    assert torch.equal(layer.qkv, torch.cat(stacked))
    assert torch.equal(layer.gate_up, torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)))


def test_a_tied_head_shares_the_embeddings_memory(tiny: Tiny) -> None:
    folder, _ = tiny(tie_word_embeddings=True)
    weights = load(folder)
    assert weights.head is weights.embedding


def test_a_sharded_checkpoint_loads_like_a_single_file(tiny: Tiny) -> None:
    folder, reference = tiny(max_shard_size="50KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    weights = load(folder)
    assert torch.equal(weights.head, reference.lm_head.weight)
    assert torch.equal(weights.layers[1].down, reference.model.layers[1].mlp.down_proj.weight)


def test_weights_are_cast_to_the_dtype_asked_for(tiny: Tiny) -> None:
    folder, reference = tiny()
    weights = load(folder, torch.bfloat16)
    assert torch.equal(weights.layers[0].down, reference.model.layers[0].mlp.down_proj.weight.bfloat16())


def test_tensors_that_exporters_add_needlessly_are_ignored(tiny: Tiny) -> None:
    folder, _ = tiny(tie_word_embeddings=True)
    extra = {"lm_head.weight": torch.zeros(97, 48), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    rewrite(folder, lambda tensors: tensors.update(extra))
    assert load(folder).head.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "lacks tensor model.layers.1.mlp.up_proj.weight"),
        (lambda t: t.pop("lm_head.weight"), "lacks tensor lm_head.weight"),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(96)}),
            "holds tensor model.layers.0.self_attn.q_proj.bias",
        ),
        (lambda t: t.update({"model.norm.weight": torch.zeros(47)}), r"model.norm.weight is \[47\].*asks for \[48\]"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(48, dtype=torch.int8)}),
            "model.norm.weight is I8, this engine reads BF16",
        ),
    ],
    ids=["missing", "missing head", "unexpected", "shape", "dtype"],
)
def test_a_checkpoint_that_does_not_fit_its_config_is_refused_by_tensor(
    tiny: Tiny, change: Callable[[Tensors], object], message: str
) -> None:
    folder, _ = tiny()
    rewrite(folder, change)
    with pytest.raises(EngineError, match=message):
        load(folder)


def test_a_folder_without_safetensors_is_refused(tiny: Tiny) -> None:
    folder, _ = tiny()
    (folder / "model.safetensors").unlink()
    with pytest.raises(EngineError, match=f"{folder} has neither model.safetensors nor"):
        load(folder)


def test_a_truncated_file_is_refused_by_name(tiny: Tiny) -> None:
    folder, _ = tiny()
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(EngineError, match=f"{path} cannot be opened"):
        load(folder)


def test_a_shard_that_is_not_there_is_refused_by_name(tiny: Tiny) -> None:
    folder, _ = tiny(max_shard_size="50KB")
    shard = min(folder.glob("*.safetensors"))
    shard.unlink()
    with pytest.raises(EngineError, match=f"{shard} cannot be opened"):
        load(folder)


def test_an_index_without_a_weight_map_is_refused(tiny: Tiny) -> None:
    folder, _ = tiny()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": []}')
    with pytest.raises(EngineError, match="weight_map"):
        load(folder)
