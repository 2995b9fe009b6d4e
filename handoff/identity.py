"""A cheap digest of a model folder, so that KV of one model is never read as another's.

Hashing gigabytes at every start is too slow; the digest covers config.json, and of every safetensors file its name, size,
header and sixteen evenly spread samples. Fine-tunes of one base differ in all layers, so samples tell them apart.
"""

import hashlib
import json
from pathlib import Path

_SAMPLES = 16
_SAMPLE_BYTES = 4096


def model_digest(model_dir: Path) -> str:
    """Return 16 hex digits for the weights and configuration in a Hugging Face folder.

    Raises FileNotFoundError, naming the file, when the folder holds no config.json or no safetensors file; ValueError when
    config.json is no JSON.
    """
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
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for path in weights:
        digest.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
        _add_samples(digest, path)
    return digest.hexdigest()[:16]


def _add_samples(digest: "hashlib._Hash", path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        digest.update(file.read(min(header_bytes, size)))
        for sample in range(_SAMPLES):
            file.seek(size * sample // _SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))
