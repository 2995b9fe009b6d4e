"""One model's folder has one digest, wherever it lies; another model's has another."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from handoff.identity import model_digest

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 48}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "model"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(CONFIG))
    weights = {"a": torch.randn(200, 300), "b": torch.randn(100, 300)}
    for name, tensor in weights.items():
        save_file({name: tensor}, place / f"model-{name}.safetensors")
    return place


def test_the_digest_is_16_hex_digits_and_stays_the_same(folder: Path, tmp_path: Path) -> None:
    digest = model_digest(folder)
    assert len(bytes.fromhex(digest)) == 8
    assert model_digest(folder) == digest
    assert model_digest(shutil.copytree(folder, tmp_path / "copy")) == digest


def test_how_the_configuration_is_written_does_not_matter(folder: Path) -> None:
    before = model_digest(folder)
    (folder / "config.json").write_text(json.dumps(dict(reversed(CONFIG.items())), indent=4))
    assert model_digest(folder) == before


def test_files_of_other_kinds_do_not_matter(folder: Path) -> None:
    before = model_digest(folder)
    (folder / "README.md").write_text("hello")
    (folder / "tokenizer.json").write_text("{}")
    assert model_digest(folder) == before


def test_another_configuration_has_another_digest(folder: Path) -> None:
    before = model_digest(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": 64}))
    assert model_digest(folder) != before


@pytest.mark.parametrize("where", [0.0, 0.5, 1.0])
def test_other_weights_of_the_same_shape_have_another_digest(folder: Path, where: float) -> None:
    before = model_digest(folder)
    weights = torch.randn(200, 300)
    weights[round(where * 199)] += 1
    save_file({"a": weights}, folder / "model-a.safetensors")
    assert model_digest(folder) != before


def test_a_file_more_less_or_renamed_is_another_digest(folder: Path) -> None:
    before = model_digest(folder)
    shutil.copy(folder / "model-a.safetensors", folder / "model-c.safetensors")
    more = model_digest(folder)
    (folder / "model-a.safetensors").unlink()
    renamed = model_digest(folder)
    (folder / "model-c.safetensors").unlink()
    assert len({before, more, renamed, model_digest(folder)}) == 4


def test_a_file_shorter_than_its_samples_is_read(folder: Path) -> None:
    (folder / "tiny.safetensors").write_bytes(b"abc")
    first = model_digest(folder)
    (folder / "tiny.safetensors").write_bytes(b"abd")
    assert model_digest(folder) != first


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        model_digest(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"no \*\.safetensors"):
        model_digest(tmp_path)


def test_a_configuration_that_is_no_json_is_named(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json"):
        model_digest(folder)
