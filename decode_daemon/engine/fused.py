"""The fused form: a model's tensors as a step multiplies with them, in files that are mapped instead of read.

A folder holds `anchorleg.json`, which says of which model it is and whether it is complete, one safetensors file for each
part of the model, and the source's configuration and tokenizer. Each part has the version of this form, the source's
identity and the SHA-256 of its data in its header, so whether it is whole, and of this model, can be seen from it alone.
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from decode_daemon.engine.checkpoint import Checkpoint, Recipe, SafetensorsFiles, check_form, recipes, stacked
from decode_daemon.engine.config import LlamaConfig, read_json
from decode_daemon.engine.protocol import EngineError
from decode_daemon.engine.tensorfile import DTYPES, Layout, TensorForm, raw, read_header, replacing, write
from handoff.identity import FUSED_RECORD

VERSION = 1
ALIGNMENT = 64  # of a part's first tensor: a cache line, and the widest vector

_AGAIN = "run anchorleg convert again"
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class Record:
    """What `anchorleg.json` says."""

    identity: str  # handoff.identity.model_digest of the source
    source: str  # where it was, for people
    config: str  # `config_digest` of the source's config.json
    rounded_to: str | None  # bfloat16 where the source's weights had more digits; None: they are all here
    complete: bool
    version: int = VERSION

    def write(self, folder: Path) -> None:
        """Replace the record in `folder`."""
        with replacing(folder / FUSED_RECORD) as file:
            file.write((json.dumps(asdict(self), indent=2) + "\n").encode())


@dataclass(frozen=True, slots=True)
class Part:
    """One file of the fused form: its name, and the recipe of each tensor in it."""

    file: str
    recipes: Mapping[str, Recipe]


def is_fused(folder: Path) -> bool:
    """Whether `folder` holds the fused form of a model, complete or not."""
    return (folder / FUSED_RECORD).is_file()


def read_record(folder: Path) -> Record:
    """Return the record in `folder`; raises EngineError naming the file and field when it cannot be understood."""
    path = folder / FUSED_RECORD
    fields = read_json(path)
    if fields.get("version") != VERSION:
        raise EngineError(f"{path}: version is {fields.get('version')!r}, this engine reads {VERSION}: {_AGAIN}")
    for name, kinds in (("identity", str), ("source", str), ("config", str), ("complete", bool)):
        if not isinstance(fields.get(name), kinds):
            raise EngineError(f"{path}: {name} is {fields.get(name)!r}: {_AGAIN}")
    if fields.get("rounded_to") not in (None, "bfloat16"):
        raise EngineError(f"{path}: rounded_to is {fields['rounded_to']!r}: {_AGAIN}")
    return Record(**{name: fields.get(name) for name in Record.__dataclass_fields__})  # type: ignore[arg-type]


def config_digest(config: Mapping[str, Any]) -> str:
    """Return the SHA-256 of what a config.json says, however it is written."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def parts(config: LlamaConfig) -> tuple[Part, ...]:
    """Return the files of the fused form: the embedding, one for each layer, and what comes after the layers."""
    files: dict[str, dict[str, Recipe]] = {}
    digits = len(str(config.layers - 1))
    for name, recipe in recipes(config).items():
        kind, _, rest = name.partition(".")
        stem = f"layer-{int(rest.partition('.')[0]):0{digits}}" if kind == "layers" else kind
        files.setdefault({"final_norm": "head"}.get(stem, stem), {})[name] = recipe
    return tuple(Part(f"fused-{stem}.safetensors", made) for stem, made in files.items())


def layout(part: Part, checkpoint: Checkpoint, identity: str, rounded_to: str | None) -> Layout:
    """Return the file that `part` of the model in `checkpoint` becomes, without the digest of its data.

    The larger tensors come first: those have sizes that keep the next one aligned. A tensor has the narrowest dtype that
    holds all of its parts exactly, or that of `rounded_to`.
    """
    forms = {name: TensorForm(_dtype(recipe, checkpoint, rounded_to), recipe.shape) for name, recipe in part.recipes.items()}
    largest_first = dict(sorted(forms.items(), key=lambda item: -item[1].bytes))
    return Layout(largest_first, {"format": "pt", "version": str(VERSION), "identity": identity}, ALIGNMENT)


def part_bytes(part: Part, checkpoint: Checkpoint, identity: str, rounded_to: str | None) -> int:
    """Return the size of the file that `write_part` writes."""
    return _signed(layout(part, checkpoint, identity, rounded_to), hashlib.sha256().hexdigest()).size


def room(folder: Path, sizes: Mapping[str, int]) -> int:
    """Return the bytes that writing files of `sizes`, by name, into `folder` takes of the disk at the most.

    A file that replaces another is written beside it first.
    """
    grown, beside = 0, 0
    for name, size in sizes.items():
        path = folder / name
        before = path.stat().st_size if path.is_file() else 0
        grown += max(0, size - before)
        beside = max(beside, size if before else 0)
    return grown + beside


def write_part(folder: Path, part: Part, checkpoint: Checkpoint, identity: str, rounded_to: str | None) -> None:
    """Write one file into `folder`; it appears whole or not at all. Memory: the part's tensors, and one source tensor.

    Raises OSError when the disk is full.
    """
    plan = layout(part, checkpoint, identity, rounded_to)
    tensors = [stacked(checkpoint, part.recipes[name], DTYPES[form.dtype]) for name, form in plan.forms.items()]
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(raw(tensor))
    with replacing(folder / part.file) as file:
        write(file, _signed(plan, digest.hexdigest()), tensors)


def is_whole(folder: Path, part: Part, checkpoint: Checkpoint, identity: str, rounded_to: str | None) -> bool:
    """Whether the file of `part` in `folder` is what `write_part` would write; its data are held against their digest."""
    path = folder / part.file
    plan = layout(part, checkpoint, identity, rounded_to)
    try:
        header, metadata = read_header(path)
        whole = _signed(plan, metadata.get("sha256", ""))
        if header != whole.header or path.stat().st_size != whole.size:
            return False
        digest = hashlib.sha256()
        with path.open("rb") as file:
            file.seek(len(header))
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    except (OSError, ValueError):
        return False
    return digest.hexdigest() == metadata["sha256"]


def open_fused(folder: Path, config: LlamaConfig, dtype: torch.dtype, files: ExitStack) -> Checkpoint:
    """Open the fused form in `folder` until `files` is closed; its tensors have the names of `recipes`.

    Raises EngineError when it is not complete, is not of the config.json beside it, has fewer digits than `dtype`, or a file
    that does not fit; the message names the file and what to do.
    """
    record = read_record(folder)
    if not record.complete:
        raise EngineError(f"{folder} is not complete: {_AGAIN} with the same folders, it goes on where it was interrupted")
    if config_digest(read_json(folder / "config.json")) != record.config:
        raise EngineError(
            f"{folder / 'config.json'} is not the one the weights were fused with: change the model's own folder instead "
            f"({record.source}), and convert it again with --overwrite"
        )
    if record.rounded_to is not None and dtype != torch.bfloat16:
        raise EngineError(
            f"{folder} holds weights rounded to {record.rounded_to}, which are not the model's in {dtype}: use --dtype "
            f"{record.rounded_to}, or convert {record.source} without it"
        )
    made = parts(config)
    checkpoint = SafetensorsFiles(folder, [folder / part.file for part in made], files)
    for part in made:
        _check_part(folder, part, checkpoint, record.identity)
    if read_record(folder) != record:  # a conversion says that it is not complete before it touches a part
        raise EngineError(f"{folder} changed while it was opened: start again when anchorleg convert has ended")
    return checkpoint


def _check_part(folder: Path, part: Part, checkpoint: Checkpoint, identity: str) -> None:
    path = folder / part.file
    metadata = read_header(path)[1]
    if (version := metadata.get("version")) != str(VERSION):
        raise EngineError(f"{path}: version is {version}, this engine reads {VERSION}: {_AGAIN}")
    if (found := metadata.get("identity")) != identity:
        raise EngineError(f"{path} is of model {found}, its folder is of {identity}: {_AGAIN}")
    for name, recipe in part.recipes.items():
        if name not in checkpoint.forms:
            raise EngineError(f"{path} lacks tensor {name}: {_AGAIN}")
        check_form(path, name, checkpoint.forms[name], recipe.shape)


def _dtype(recipe: Recipe, checkpoint: Checkpoint, rounded_to: str | None) -> str:
    if rounded_to is not None:
        return "BF16"
    found = {checkpoint.forms[name].dtype for name in recipe.parts}
    return found.pop() if len(found) == 1 else "F32"  # F32 holds both others exactly


def _signed(plan: Layout, sha256: str) -> Layout:
    return Layout(plan.forms, {**plan.metadata, "sha256": sha256}, plan.alignment)
