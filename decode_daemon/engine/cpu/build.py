"""Builds the C++ beside this file into one shared library, once for a machine's cache folder.

`python -m decode_daemon.engine.cpu.build` builds it ahead of time, as an image does. The library is found by a hash of source
and flags, and by the compiler's own version; where there is no compiler, one that was built from this very source will do.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

SOURCES = Path(__file__).parent
BUILD_TIMEOUT_S = 120.0

_LOCK_POLL_S = 0.1
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-pthread", "-w")
_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_OBJECTS: dict[str, tuple[str, ...]] = {
    "api": ("api.cpp",),
    "team": ("team.cpp",),
    "avx512": (*_AVX512, "-DWORK=anchorleg_work_avx512", "work.cpp"),
    "avx2": (*_AVX2, "-DWORK=anchorleg_work_avx2", "work.cpp"),
}
# The image that runs it may have another libstdc++ than the one that built it.
_LINK = ("-shared", "-pthread", "-static-libstdc++", "-static-libgcc")


class BuildError(Exception):
    """There is no native library; the message is the reason, in one line."""


def default_cache_dir() -> Path:
    """Return the folder for built libraries: `anchorleg` in $XDG_CACHE_HOME, or in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "anchorleg"


def library(cache_dir: Path | None = None) -> Path:
    """Return the shared library in `cache_dir` (default: `default_cache_dir`), built first if it is not there.

    Processes that start together build it once: the others wait, `BUILD_TIMEOUT_S` at the most. It appears whole or not at
    all. Raises BuildError when it can neither be found nor built.
    """
    if platform.machine() not in ("x86_64", "AMD64") or platform.system() != "Linux":
        raise BuildError(f"the native step is for Linux on x86-64, this is {platform.system()} on {platform.machine()}")
    try:
        folder = cache_dir or default_cache_dir()
        compiler = _compiler()
        if compiler is None:
            return _built_elsewhere(folder)
        path = folder / f"step-{_source_hash()}-{_digest(_version(compiler))}.so"
        if not path.is_file():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _lock(path.with_suffix(".lock")):
                if not path.is_file():
                    _build(compiler, path)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        raise BuildError(f"the native step's cache folder cannot be used ({error})") from error
    return path


def _compiler() -> str | None:
    for name in (os.environ.get("CXX"), "g++", "c++"):
        if name and (found := shutil.which(name)):
            return found
    return None


def _built_elsewhere(folder: Path) -> Path:
    found = sorted(folder.glob(f"step-{_source_hash()}-*.so")) if folder.is_dir() else []
    if not found:
        raise BuildError(f"there is no C++ compiler on PATH, and no library built from this version in {folder}: install g++")
    return found[0]


def _source_hash() -> str:
    files = sorted(path for path in SOURCES.iterdir() if path.suffix in (".cpp", ".h"))
    return _digest(*(path.read_text(encoding="utf-8") for path in files), repr((_FLAGS, _OBJECTS, _LINK)))


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _version(compiler: str) -> str:
    return _run([compiler, "--version"]).partition("\n")[0]


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold the file's lock; its owner's death frees it. Raises BuildError when it takes longer than a build may."""
    deadline = time.monotonic() + BUILD_TIMEOUT_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BuildError(f"another process has held {path} for {BUILD_TIMEOUT_S:.0f} s: end it") from None
                time.sleep(_LOCK_POLL_S)
        yield


def _build(compiler: str, path: Path) -> None:
    # Beside its destination: a rename within one file system is atomic.
    with tempfile.TemporaryDirectory(prefix=".build-", dir=path.parent) as name:
        work = Path(name)
        objects = [str(work / f"{stem}.o") for stem in _OBJECTS]
        commands = [
            [compiler, *_FLAGS, "-c", *arguments[:-1], str(SOURCES / arguments[-1]), "-o", target]
            for arguments, target in zip(_OBJECTS.values(), objects, strict=True)
        ]
        with ThreadPoolExecutor(len(commands)) as pool:
            list(pool.map(_run, commands))
        _run([compiler, *objects, *_LINK, "-o", str(work / path.name)])
        (work / path.name).replace(path)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} failed: {error}") from error
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if "error" in line.lower()]
        told = lines[0] if lines else f"it ended with status {done.returncode}"
        raise BuildError(f"{command[0]} cannot build the native step: {told.strip()}")
    return done.stdout


if __name__ == "__main__":
    print(library())
