"""The fused form computes bit for bit what its source computes, is mapped, not copied, and is refused when it does not fit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from cli.convert import Wanted, run
from decode_daemon.engine.checkpoint import SafetensorsFiles
from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.model import LlamaModel
from decode_daemon.engine.protocol import EngineError
from decode_daemon.engine.steps import choose_step
from decode_daemon.engine.weights import LayerWeights, Weights, load_weights
from handoff.identity import model_digest
from tests.kit.families import FAMILIES, PROMPT

Tiny = Callable[..., tuple[Path, Any]]

DTYPES = (torch.float32, torch.bfloat16)
EVERY = FAMILIES | {
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3 tied": ("Qwen3", {"tie_word_embeddings": True}),
}
families = pytest.mark.parametrize(("family", "changes"), EVERY.values(), ids=EVERY.keys())


def fuse(folder: Path, **options: Any) -> Path:
    (folder / "tokenizer.json").touch()
    run(Wanted(model_dir=folder, save_dir=folder / "fused", **options), Console(quiet=True))
    return folder / "fused"


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Weights:
    return load_weights(folder, LlamaConfig.read(folder), dtype)


def logits(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    model = LlamaModel(LlamaConfig.read(folder), load(folder, dtype), 64)
    with torch.inference_mode():
        return torch.cat([model.forward(torch.tensor([token]), at) for at, token in enumerate(PROMPT)])


def tensors(weights: Weights) -> dict[str, torch.Tensor]:
    found = {"embedding": weights.embedding, "final_norm": weights.final_norm, "head": weights.head}
    for index, layer in enumerate(weights.layers):
        parts = ((name, getattr(layer, name)) for name in LayerWeights.__dataclass_fields__)
        found |= {f"{index}.{name}": part for name, part in parts if part is not None}
    return found


def assert_same_bits(one: Weights, two: Weights) -> None:
    ours, theirs = tensors(one), tensors(two)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(tensor, theirs[name]), name


@families
def test_logits_are_those_of_the_source_bit_for_bit_and_those_of_transformers(
    tiny: Tiny, family: str, changes: dict[str, Any]
) -> None:
    folder, reference = tiny(family, **changes)
    fused = fuse(folder)
    for dtype in DTYPES:
        assert torch.equal(logits(fused, dtype), logits(folder, dtype))
    with torch.inference_mode():
        wanted = reference(torch.tensor([PROMPT])).logits[0]
    # Both are float32 with sums taken in another order; logits here reach about 20.
    torch.testing.assert_close(logits(fused, torch.float32), wanted, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32", "mixed"])
def test_whatever_the_source_is_stored_as_both_forms_load_the_same_bits(tiny: Tiny, stored: str) -> None:
    folder, _ = tiny("Qwen2")
    dtypes = [torch.bfloat16, torch.float16, torch.float32] if stored == "mixed" else [getattr(torch, stored)]
    path = folder / "model.safetensors"
    whole = load_file(path)
    save_file({name: whole[name].to(dtypes[at % len(dtypes)]) for at, name in enumerate(whole)}, path)
    fused = fuse(folder)
    for dtype in DTYPES:
        assert_same_bits(load(fused, dtype), load(folder, dtype))


def test_weights_of_the_dtype_asked_for_are_mapped_from_the_files(tiny: Tiny) -> None:
    folder, _ = tiny(tie_word_embeddings=True)
    fused = fuse(folder)
    weights = load(fused)
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines if f"{fused}/" in line]
    mapped = [(int(begin, 16), int(end, 16)) for begin, end in spans]
    assert all(any(begin <= tensor.data_ptr() < end for begin, end in mapped) for tensor in tensors(weights).values())
    assert weights.head is weights.embedding
    assert weights.layers[0].qkv.data_ptr() % 32 == 0


def test_the_native_step_computes_the_same_from_mapped_weights(tiny: Tiny) -> None:
    folder, _ = tiny()
    rows = []
    for place in (folder, fuse(folder)):
        model = choose_step(LlamaConfig.read(place), load(place, torch.bfloat16), 64, step="native", threads=2, pin=False)
        rows.append(model.forward(torch.tensor(PROMPT), 0))
    assert torch.equal(rows[0], rows[1])


def test_rounded_weights_are_those_a_bfloat16_daemon_makes_and_no_others(tiny: Tiny) -> None:
    folder, _ = tiny()
    fused = fuse(folder, rounded_to="bfloat16")
    assert_same_bits(load(fused, torch.bfloat16), load(folder, torch.bfloat16))
    with pytest.raises(
        EngineError, match=f"{fused} holds weights rounded to bfloat16.*use --dtype bfloat16, or convert {folder}"
    ):
        load(fused, torch.float32)


def test_the_fused_form_has_the_identity_of_its_source(tiny: Tiny) -> None:
    folder, _ = tiny()
    assert model_digest(fuse(folder)) == model_digest(folder)


def rewrite(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"identity": 5}', '{"identity": "0123"}'])
def test_a_record_without_an_identity_is_refused_by_name(tmp_path: Path, content: str) -> None:
    record = tmp_path / "anchorleg.json"
    record.write_text(content)
    with pytest.raises(ValueError, match=f"{record}.*: run anchorleg convert again"):
        model_digest(tmp_path)


def save_again(path: Path, *, without: str = "", **metadata: str) -> None:
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    kept = {name: tensor for name, tensor in load_file(path).items() if name != without}
    save_file(kept, path, metadata=header["__metadata__"] | metadata)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (
            lambda at: rewrite(at / "anchorleg.json", complete=False),
            "is not complete: run anchorleg convert again with the same",
        ),
        (lambda at: rewrite(at / "anchorleg.json", version=2), "version is 2, this engine reads 1: run"),
        (lambda at: rewrite(at / "anchorleg.json", config=None), "config is None: run"),
        (lambda at: rewrite(at / "anchorleg.json", rounded_to="int4"), "rounded_to is 'int4': run"),
        (
            lambda at: rewrite(at / "anchorleg.json", identity="f" * 16),
            r"fused-embedding.safetensors is of model \w+, its folder",
        ),
        (lambda at: rewrite(at / "config.json", rms_norm_eps=1e-3), "config.json is not the one the weights were fused with"),
        (lambda at: (at / "fused-layer-1.safetensors").unlink(), "fused-layer-1.safetensors cannot be opened"),
        (lambda at: cut(at / "fused-head.safetensors"), "fused-head.safetensors cannot be opened"),
        (
            lambda at: save_again(at / "fused-layer-1.safetensors", without="layers.1.down"),
            "fused-layer-1.safetensors lacks tensor layers.1.down: run",
        ),
        (
            lambda at: save_again(at / "fused-layer-1.safetensors", version="0"),
            "fused-layer-1.safetensors: version is 0, this engine reads 1: run",
        ),
    ],
    ids=["incomplete", "version", "field", "rounding", "another model", "config", "missing", "cut", "tensor", "part's version"],
)
def test_a_folder_that_does_not_fit_together_is_refused_by_name(
    tiny: Tiny, harm: Callable[[Path], object], message: str
) -> None:
    folder, _ = tiny()
    fused = fuse(folder)
    harm(fused)
    with pytest.raises(EngineError, match=message):
        load(fused)


@pytest.mark.parametrize("fields", [{"complete": False}, {"identity": "f" * 16}])
def test_a_folder_that_is_converted_while_it_is_opened_is_refused(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    folder, _ = tiny()
    fused = fuse(folder)

    def opened(*arguments: Any) -> SafetensorsFiles:
        found = SafetensorsFiles(*arguments)
        rewrite(fused / "anchorleg.json", **fields)
        return found

    monkeypatch.setattr("decode_daemon.engine.fused.SafetensorsFiles", opened)
    with pytest.raises(EngineError, match=f"{fused} changed while it was opened"):
        load(fused)
