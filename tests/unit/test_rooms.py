import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("cli", "extproc", "gateway", "decode_daemon", "connector", "leases", "handoff", "process")


def check_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; sys.path.insert(0, '.'); from importlinter.cli import lint_imports_command as c; c()"
    return subprocess.run(
        [sys.executable, "-P", "-c", code, "--no-cache", "--no-logo", str(ROOT / ".importlinter")],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_rooms_keep_the_import_rules() -> None:
    done = check_imports(ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("room", "imported"),
    [
        ("handoff", "gateway"),
        ("decode_daemon", "gateway"),
        ("connector", "decode_daemon"),
        ("gateway", "extproc"),
        ("leases", "handoff"),
        ("connector", "leases"),
        ("extproc", "decode_daemon"),
        ("gateway", "vllm"),
        ("extproc", "torch"),
        ("gateway", "envoy"),
        ("handoff", "redis"),
    ],
)
def test_an_import_against_the_rules_is_found(tmp_path: Path, room: str, imported: str) -> None:
    for name in ROOMS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / room / "wrong.py").write_text(f"import {imported}\n")
    done = check_imports(tmp_path)
    assert done.returncode == 1
    assert f"{room}.wrong -> {imported}" in done.stdout
