import os
import sys
from pathlib import Path

import pytest

from cli.programs import MissingProgramError, find_program, require_module


@pytest.mark.parametrize("name", ["envoy", "valkey-server"])
def test_the_packages_bring_their_programs(name: str) -> None:
    (path,) = find_program(name)
    assert os.access(path, os.X_OK)


def test_python_is_the_one_that_runs_us() -> None:
    assert find_program("python") == (sys.executable,)


def test_other_programs_are_found_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "store"
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_program("store") == (str(program),)


def test_a_missing_module_is_refused_with_what_brings_it() -> None:
    require_module("json", "the standard library")
    with pytest.raises(MissingProgramError, match=r"no_such is not installed: .*\(package no-such\)"):
        require_module("no_such", "no-such")
