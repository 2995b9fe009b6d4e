"""A cheap digest of a model folder, so that KV of one model is never read as another's.

Hashing gigabytes at every start is too slow; the digest covers config.json, and of every safetensors file its name, size,
header and sixteen evenly spread samples. Fine-tunes of one base differ in all layers, so samples tell them apart.

A folder in the engine's fused form holds other files with the same weights. Its record says the digest of the folder it was
made from: that is the model which vLLM computes with.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

FUSED_RECORD = "anchorleg.json"  # in a folder of the fused form; its field `identity` is a digest

_SAMPLES = 16
_SAMPLE_BYTES = 4096


class WeightsFile(Protocol):
    """A safetensors file as the digest reads it; it need not be on a disk."""

    @property
    def name(self) -> str:
        """The file's name, without folders."""
        ...

    @property
    def size(self) -> int:
        """Bytes."""
        ...

    def read(self, start: int, length: int) -> bytes:
        """Return `length` bytes from `start` on, fewer where the file ends."""
        ...


def model_digest(model_dir: Path) -> str:
    """Return 16 hex digits for the weights and configuration in a Hugging Face folder, or in the fused form of one.

    Raises FileNotFoundError, naming the file, when the folder holds no config.json or no safetensors file; ValueError when
    config.json is no JSON or the fused form's record is damaged.
    """
    record = model_dir / FUSED_RECORD
    if record.is_file():
        return _recorded(record)
    config = model_dir / "config.json"
    weights = sorted(model_dir.glob("*.safetensors"))
    if not config.is_file():
        raise FileNotFoundError(f"{config} is missing: point to a Hugging Face model folder")
    if not weights:
        raise FileNotFoundError(f"no *.safetensors in {model_dir}: convert the weights first")
    try:
        settings = json.loads(config.read_bytes())
    except ValueError as error:
        raise ValueError(f"{config} is no JSON ({error}): point to a Hugging Face model folder") from error
    return weights_digest(settings, map(_OnDisk, weights))


def weights_digest(settings: Mapping[str, Any], files: Iterable[WeightsFile]) -> str:
    """Return the digest of a folder whose config.json says `settings` and whose safetensors files, by name, are `files`."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for file in files:
        digest.update(f"\0{file.name}\0{file.size}\0".encode())
        header_bytes = int.from_bytes(file.read(0, 8), "little")
        digest.update(file.read(8, min(header_bytes, file.size)))
        for sample in range(_SAMPLES):
            digest.update(file.read(file.size * sample // _SAMPLES, _SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _recorded(record: Path) -> str:
    try:
        identity = json.loads(record.read_bytes())["identity"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{record} is damaged ({error!r}): run anchorleg convert again") from error
    if not isinstance(identity, str) or not re.fullmatch("[0-9a-f]{16}", identity):
        raise ValueError(f"{record}: identity is {identity!r}, not 16 hex digits: run anchorleg convert again")
    return identity


class _OnDisk:
    def __init__(self, path: Path) -> None:
        self._path = path
        self.name = path.name
        self.size = path.stat().st_size

    def read(self, start: int, length: int) -> bytes:
        with self._path.open("rb") as file:
            file.seek(start)
            return file.read(length)
