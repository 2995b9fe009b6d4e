"""A GGUF file is read as the Hugging Face folder of its model in bfloat16, bit for bit, or refused by name."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from rich.console import Console

from cli.convert import ConvertError, Wanted, run
from cli.model import convert
from decode_daemon.engine.config import LlamaConfig, parse_config
from decode_daemon.engine.gguf import GgufModel, ModelError
from decode_daemon.engine.weights import load_weights
from handoff.identity import model_digest
from tests.kit.families import LLAMA3_ROPE
from tests.unit.engine.test_engine_weights_fused import assert_same_bits

Tiny = Callable[..., tuple[Path, Any]]

SIZES = {"hidden_size": 96, "intermediate_size": 160}  # whole blocks of 32 for quantisation
LLAMA31 = LLAMA3_ROPE | {"original_max_position_embeddings": 8192, "rope_theta": 500_000.0}
NAMES = {
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "norm": "output_norm",
}
LETTERS = [chr(code) for code in range(ord("!"), ord("!") + 90)]  # as byte-level tokenizers write these bytes
TOKENS = ["<|end|>", *LETTERS, "Ġ", "Ċ", "ab", "cd", "ef", "gh"]
END = 0


def write_gguf(
    path: Path,
    reference: Any,
    quantised: GGMLQuantizationType = GGMLQuantizationType.F32,
    more: Callable[[GGUFWriter], object] = lambda writer: None,
) -> Path:
    """Write transformers' model `reference` as llama.cpp's converter does."""
    config = reference.config
    name = config.model_type
    writer = GGUFWriter(path, name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] + [1] * (len(TOKENS) - 1))
    writer.add_token_merges(["a b", "c d", "e f", "g h"])
    writer.add_eos_token_id(END)
    more(writer)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for full, parameter in reference.state_dict().items():
        if full == "lm_head.weight" and config.tie_word_embeddings:
            continue
        *_, part, kind = full.split(".")
        values = parameter.numpy()
        if name == "llama" and part in heads:
            # Neighbours are what rotary embedding turns together.
            values = values.reshape(heads[part], 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        layer = f"blk.{full.split('.')[2]}." if ".layers." in full else ""
        if values.ndim > 1:
            writer.add_tensor(
                f"{layer}{NAMES[part]}.{kind}", quantize(np.ascontiguousarray(values), quantised), raw_dtype=quantised
            )
        else:
            writer.add_tensor(f"{layer}{NAMES[part]}.{kind}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def rope_factors(writer: GGUFWriter) -> None:
    """The factors of LLAMA31, from transformers' own computation of its frequencies."""
    from transformers import LlamaConfig as Reference
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = Reference(head_dim=16, max_position_embeddings=256, rope_parameters=LLAMA31)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500_000.0 ** (-torch.arange(0, 16, 2) / 16)
    writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy().astype(np.float32))


@pytest.mark.parametrize(
    ("family", "changes", "more"),
    [
        ("Llama", {}, lambda writer: None),
        ("Llama", {"tie_word_embeddings": True}, lambda writer: None),
        ("Llama", {"rope_parameters": LLAMA31}, rope_factors),
        ("Qwen2", {}, lambda writer: None),
        ("Qwen3", {"tie_word_embeddings": True}, lambda writer: None),
    ],
    ids=["llama", "llama tied", "llama 3.1", "qwen2", "qwen3 tied"],
)
def test_config_and_weights_are_those_of_the_folder_it_was_made_from(
    tiny: Tiny, tmp_path: Path, family: str, changes: dict[str, Any], more: Callable[[GGUFWriter], object]
) -> None:
    folder, reference = tiny(family, **SIZES | changes)
    gguf = write_gguf(tmp_path / "tiny.gguf", reference, more=more)
    assert parse_config(GgufModel(gguf).config) == LlamaConfig.read(folder)
    run(Wanted(model_dir=gguf, save_dir=tmp_path / "fused"), Console(quiet=True))
    wanted = load_weights(folder, LlamaConfig.read(folder), torch.bfloat16)
    assert_same_bits(load_weights(tmp_path / "fused", LlamaConfig.read(folder), torch.bfloat16), wanted)


@pytest.mark.parametrize(
    "kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.F16, GGMLQuantizationType.BF16]
)
def test_the_identity_is_that_of_the_folder_vllm_runs_on(tiny: Tiny, tmp_path: Path, kind: GGMLQuantizationType) -> None:
    _, reference = tiny(**SIZES)
    gguf = write_gguf(tmp_path / "tiny.gguf", reference, kind)
    folder = tmp_path / "folder"
    convert(gguf, folder)
    run(Wanted(model_dir=gguf, save_dir=tmp_path / "fused"), Console(quiet=True))
    assert model_digest(tmp_path / "fused") == model_digest(folder)
    config = LlamaConfig.read(folder)
    for dtype in (torch.float32, torch.bfloat16):
        assert_same_bits(load_weights(tmp_path / "fused", config, dtype), load_weights(folder, config, dtype))
    assert (tmp_path / "fused" / "tokenizer.json").read_text() == (folder / "tokenizer.json").read_text()
    down = reference.model.layers[1].mlp.down_proj.weight.detach().numpy()
    undone = torch.from_numpy(dequantize(quantize(down, kind), kind)).bfloat16()
    assert torch.equal(load_weights(folder, config, torch.bfloat16).layers[1].down, undone)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.999])
def test_a_file_that_is_cut_short_is_refused_by_name(tiny: Tiny, tmp_path: Path, share: float) -> None:
    _, reference = tiny(**SIZES)
    gguf = write_gguf(tmp_path / "tiny.gguf", reference)
    gguf.write_bytes(gguf.read_bytes()[: int(gguf.stat().st_size * share)])
    with pytest.raises(ModelError, match=f"{gguf} cannot be read as GGUF"):
        GgufModel(gguf)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (lambda w: w.add_sliding_window(4096), "llama.attention.sliding_window is 4096, which this engine does not compute"),
        (lambda w: w.add_expert_count(8), "llama.expert_count is 8"),
        (lambda w: w.add_uint16("split.count", 3), "is one of 3 parts: join them first"),
        (lambda w: w.add_string("llama.rope.scaling.type", "linear"), "has no llama.rope.scaling.factor"),
        (lambda w: w.add_tensor("blk.0.ssm_a.weight", np.zeros(32, np.float32)), "no tensor blk.0.ssm_a.weight"),
        (lambda w: w.add_tensor("rope_freqs.weight", np.full(8, 2.0, np.float32)), "is not the scaling of Llama 3.1 to 3.3"),
    ],
    ids=["sliding window", "experts", "split", "rope scaling", "tensor", "rope factors"],
)
def test_what_the_engine_does_not_compute_is_refused_by_name_before_anything_is_written(
    tiny: Tiny, tmp_path: Path, more: Callable[[GGUFWriter], object], message: str
) -> None:
    _, reference = tiny(**SIZES)
    gguf = write_gguf(tmp_path / "tiny.gguf", reference, more=more)
    with pytest.raises(ModelError, match=message):
        run(Wanted(model_dir=gguf, save_dir=tmp_path / "fused"), Console(quiet=True))
    assert not (tmp_path / "fused").exists()


def test_factors_of_rope_outside_llama_are_refused_by_name(tiny: Tiny, tmp_path: Path) -> None:
    _, reference = tiny("Qwen2", **SIZES)
    gguf = write_gguf(tmp_path / "tiny.gguf", reference, more=rope_factors)
    with pytest.raises(ModelError, match=r"a qwen2 model has no tensor rope_freqs\.weight"):
        GgufModel(gguf)


@pytest.mark.parametrize("error", [Exception("merges"), KeyError("model"), ImportError("sentencepiece"), OSError("gone")])
def test_a_tokenizer_that_cannot_be_made_is_told_before_anything_is_written(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(gguf: Path, directory: Path) -> None:
        raise error

    _, reference = tiny(**SIZES)
    gguf = write_gguf(tmp_path / "tiny.gguf", reference)
    monkeypatch.setattr("cli.convert.save_tokenizer", fails)
    with pytest.raises(ConvertError, match=rf"no tokenizer of {gguf} \({type(error).__name__}.*convert a Hugging Face folder"):
        run(Wanted(model_dir=gguf, save_dir=tmp_path / "fused"), Console(quiet=True))
    assert not (tmp_path / "fused").exists()


def test_a_scaling_of_rope_that_is_not_known_is_refused_by_name(tiny: Tiny, tmp_path: Path) -> None:
    def longrope(writer: GGUFWriter) -> None:
        writer.add_string("llama.rope.scaling.type", "longrope")
        writer.add_rope_scaling_factor(4.0)

    _, reference = tiny(**SIZES)
    gguf = write_gguf(tmp_path / "tiny.gguf", reference, more=longrope)
    with pytest.raises(ConvertError, match=r"tiny\.gguf: rope_parameters\.rope_type is 'longrope'"):
        run(Wanted(model_dir=gguf, save_dir=tmp_path / "fused"), Console(quiet=True))


def test_without_the_gguf_package_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match="not installed: pip install gguf"):
        GgufModel(tmp_path / "any.gguf")
