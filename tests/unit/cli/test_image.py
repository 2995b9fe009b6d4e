"""The files that the Dockerfile copies are enough to build the distribution."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_what_the_dockerfile_copies_builds(tmp_path: Path) -> None:
    copied = [
        line.split()[1:-1]
        for line in (ROOT / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ") and "--from=" not in line
    ]
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for name in (name for names in copied for name in names):
        assert name in allowed, f"{name} is copied, but .dockerignore leaves it out"
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    build = "import setuptools.build_meta as backend; print(backend.build_wheel('dist'))"
    (tmp_path / "dist").mkdir()
    built = subprocess.run(
        [sys.executable, "-c", build], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert built.returncode == 0, built.stderr[-2000:]
    assert re.search(r"anchorleg-[\w.]+-py3-none-any\.whl", built.stdout)
