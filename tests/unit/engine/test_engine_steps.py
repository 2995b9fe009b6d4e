"""Which step computes, and that a machine without a compiler still serves."""

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.cpu.build import BuildError, library
from decode_daemon.engine.cpu.native import NativeModel
from decode_daemon.engine.model import LlamaModel
from decode_daemon.engine.protocol import EngineError
from decode_daemon.engine.steps import StepModel, choose_step
from decode_daemon.engine.weights import load_weights

Tiny = Callable[..., tuple[Path, Any]]


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.delenv("CXX", raising=False)


@pytest.fixture
def broken_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "broken-g++"
    compiler.write_text("#!/bin/sh\n[ \"$1\" = --version ] && echo broken && exit 0\necho 'error: out of luck' >&2\nexit 1\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(compiler))


def choose(folder: Path, **wishes: Any) -> tuple[StepModel, dict[str, Any]]:
    """The step, and the one line that was logged about it."""
    config = LlamaConfig.read(folder)
    with structlog.testing.capture_logs() as lines:
        model = choose_step(config, load_weights(folder, config, torch.bfloat16), 64, **wishes)
    (line,) = lines
    return model, dict(line)


def test_the_native_step_is_chosen_where_it_can_be_and_says_so(tiny: Tiny, native_cache: Path) -> None:
    model, line = choose(tiny()[0], cache_dir=native_cache, threads=1)
    assert isinstance(model, NativeModel)
    assert line["step"] == "native"
    assert line["threads"] == 1
    assert line["instructions"] in ("avx512", "avx2")


def test_pytorch_is_chosen_when_it_is_asked_for(tiny: Tiny, tmp_path: Path) -> None:
    model, line = choose(tiny()[0], step="torch", cache_dir=tmp_path / "cache")
    assert isinstance(model, LlamaModel)
    assert line["why"] == "chosen by the settings"


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_pytorch_serves_and_the_log_says_why(tiny: Tiny, tmp_path: Path) -> None:
    folder, _ = tiny()
    model, line = choose(folder, cache_dir=tmp_path / "cache")
    assert isinstance(model, LlamaModel)
    assert "no C++ compiler" in line["why"]
    assert line["log_level"] == "warning"
    with pytest.raises(EngineError, match=r"no C\+\+ compiler.*install g\+\+"):
        choose(folder, step="native", cache_dir=tmp_path / "cache")


@pytest.mark.usefixtures("broken_compiler")
def test_a_compiler_that_fails_is_quoted_and_pytorch_serves(tiny: Tiny, tmp_path: Path) -> None:
    model, line = choose(tiny()[0], cache_dir=tmp_path / "cache")
    assert isinstance(model, LlamaModel)
    assert "out of luck" in line["why"]
    assert not list((tmp_path / "cache").glob("*.so"))


def test_a_shape_the_native_step_does_not_have_goes_to_pytorch(tiny: Tiny, tmp_path: Path) -> None:
    model, line = choose(tiny(intermediate_size=72)[0], cache_dir=tmp_path / "cache")
    assert isinstance(model, LlamaModel)
    assert "intermediate is 72" in line["why"]


@pytest.mark.usefixtures("no_compiler")
def test_a_library_that_was_built_before_needs_no_compiler(built_together: list[Path], native_cache: Path) -> None:
    assert library(native_cache) == built_together[0]


def test_a_cache_folder_that_cannot_be_made_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="cache folder"):
        library(tmp_path / "file" / "cache")


def test_two_processes_that_start_together_build_one_library(built_together: list[Path], native_cache: Path) -> None:
    first, second = built_together
    assert first == second
    assert [path.name for path in native_cache.glob("*.so")] == [first.name]
    assert not list(native_cache.glob(".build-*"))
