"""A folder that holds a conversion already: what is damaged is mended, and what is another's is left alone."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cli.convert import LOCK_FILE, ConvertError, locked
from decode_daemon.engine.fused import Record, read_record, write_part
from handoff.identity import model_digest
from tests.kit.converting import anchorleg, contents, convert, model


def test_a_second_run_keeps_every_file(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "fused"
    convert(source, target)
    before = {path: path.stat().st_ino for path in target.iterdir()}
    convert(source, target)
    assert {path: path.stat().st_ino for path in target.iterdir()} == before


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "harm",
    [damage, Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1]), lambda path: path.write_bytes(b"{")],
    ids=["one bit", "gone", "cut short", "no safetensors"],
)
def test_a_damaged_file_is_found_and_written_again(source: Path, tmp_path: Path, harm: Callable[[Path], object]) -> None:
    target = tmp_path / "fused"
    convert(source, target)
    wanted = contents(target)
    harm(target / "fused-layer-1.safetensors")
    convert(source, target)
    assert contents(target) == wanted


@pytest.mark.parametrize(
    "harm",
    [
        lambda source, target: (target / "tokenizer.json").unlink(),
        lambda source, target: (target / "config.json").write_text("{}"),
        lambda source, target: (target / "chat_template.jinja").touch(),
        lambda source, target: (source / "generation_config.json").write_text('{"temperature": 0.7}'),
        lambda source, target: (source / "generation_config.json").unlink(),
        lambda source, target: (source / "chat_template.jinja").write_text("{{ messages }}"),
    ],
    ids=["gone", "edited", "one too many", "changed in the source", "gone in the source", "new in the source"],
)
def test_what_lies_beside_the_weights_is_made_the_sources_again(
    source: Path, tmp_path: Path, harm: Callable[[Path, Path], object]
) -> None:
    target, wanted = tmp_path / "fused", tmp_path / "wanted"
    convert(source, target)
    weights = {path: path.stat().st_ino for path in target.glob("fused-*")}
    harm(source, target)
    convert(source, target)
    convert(source, wanted)
    assert contents(target) == contents(wanted)
    assert {path: path.stat().st_ino for path in target.glob("fused-*")} == weights


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_a_source_that_changes_while_it_is_read_leaves_nothing_a_daemon_takes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    def write_and_change(*arguments: Any) -> None:
        write_part(*arguments)
        os.utime(source / file, ns=(0, 0))

    target = tmp_path / "fused"
    monkeypatch.setattr("cli.convert.write_part", write_and_change)
    with pytest.raises(ConvertError, match=f"{source} changed while it was read"):
        convert(source, target)
    assert not read_record(target).complete
    assert list(target.glob("fused-*")) == []
    monkeypatch.undo()
    convert(source, target)
    assert read_record(target).complete


def test_another_model_does_not_take_the_folder_unless_told_to(source: Path, tmp_path: Path) -> None:
    other, target, wanted = model(tmp_path / "other", seed=1, num_hidden_layers=2), tmp_path / "fused", tmp_path / "wanted"
    (source / "merges.txt").write_text("a b")
    convert(source, target)
    (target / "notes.txt").write_text("mine")
    before = contents(target)
    with pytest.raises(ConvertError) as refused:
        convert(other, target)
    assert str(refused.value) == (
        f"{target} holds {source} (identity {model_digest(source)}), not {other} (identity {model_digest(other)}): "
        "choose another --save-dir, or say --overwrite"
    )
    assert contents(target) == before
    convert(other, target, overwrite=True)
    convert(other, wanted)
    assert contents(target) == contents(wanted) | {"notes.txt": b"mine"}


def test_a_half_overwritten_folder_is_the_new_models_and_goes_on_as_such(source: Path, tmp_path: Path) -> None:
    other, target, wanted = model(tmp_path / "other", seed=1), tmp_path / "fused", tmp_path / "wanted"
    convert(source, target)
    convert(other, wanted)
    # What a run leaves that was killed after its first file.
    Record(**json.loads((wanted / "anchorleg.json").read_text()) | {"complete": False}).write(target)
    shutil.copy(wanted / "fused-embedding.safetensors", target)
    with pytest.raises(ConvertError, match=f"holds {other} "):
        convert(source, target)
    convert(other, target)
    assert contents(target) == contents(wanted)


def test_rounded_weights_are_another_conversion_of_the_same_model(tmp_path: Path) -> None:
    source, target = model(tmp_path / "float32", dtype=torch.float32), tmp_path / "fused"
    convert(source, target)
    with pytest.raises(ConvertError, match="rounded to bfloat16"):
        convert(source, target, rounded_to="bfloat16")
    convert(source, target, rounded_to="bfloat16", overwrite=True)
    assert load_file(target / "fused-layer-0.safetensors")["layers.0.down"].dtype == torch.bfloat16
    assert model_digest(target) == model_digest(source)


def test_two_conversions_into_one_folder_refuse_each_other_by_name(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "fused"
    target.mkdir()
    with locked(target):
        done = anchorleg("convert", "--model-dir", str(source), "--save-dir", str(target))
        assert done.returncode == 2
        assert f"process {os.getpid()} on " in done.stderr
        assert f"converts into {target} just now" in done.stderr
        assert [path.name for path in target.iterdir()] == [LOCK_FILE]
    convert(source, target)


def test_a_lock_and_what_else_a_killed_run_left_are_in_nobodys_way(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "fused"
    target.mkdir()
    (target / LOCK_FILE).write_text("anchorleg convert, process 1 on nowhere,")
    (target / ".anchorleg.json.partial").touch()
    convert(source, target)
    assert list(target.glob(".*")) == []
    for name in ("tokenizer.json", "fused-layer-30.safetensors"):
        (target / f".{name}.partial").touch()
    (target / ".download.partial").touch()
    (target / ".merges.txt.partial").mkdir()
    convert(source, target)
    assert {path.name for path in target.glob(".*")} == {".download.partial", ".merges.txt.partial"}


def test_a_folder_with_files_of_others_is_left_alone(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    target.mkdir()
    (target / "thesis.txt").touch()
    for overwrite in (False, True):
        with pytest.raises(ConvertError, match=r"holds thesis\.txt, which no conversion wrote"):
            convert(source, target, overwrite=overwrite)
    with pytest.raises(ConvertError, match=r"holds config\.json, which no conversion wrote"):
        convert(source, source)
    assert [path.name for path in target.iterdir()] == ["thesis.txt"]
