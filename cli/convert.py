"""`anchorleg convert`: writes the engine's fused form of a model once, so that daemons map it instead of building it.

What can be refused is refused before anything is written. Then every file appears whole or not at all, and a run that was
interrupted, at whatever byte, is taken up by the next one: what is there and whole is kept.
"""

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from cli.convert_view import Shown
from cli.model import save_tokenizer
from decode_daemon.engine.checkpoint import Checkpoint, SafetensorsFiles, check, expected_shapes, safetensors_paths
from decode_daemon.engine.config import LlamaConfig, parse_config, read_json
from decode_daemon.engine.fused import (
    Part,
    Record,
    config_digest,
    is_fused,
    is_whole,
    part_bytes,
    parts,
    read_record,
    room,
    write_part,
)
from decode_daemon.engine.gguf import GgufModel
from decode_daemon.engine.protocol import EngineError
from decode_daemon.engine.tensorfile import PARTIAL, Stamps, TakenError, alone, replacing, stamps_of
from handoff.identity import FUSED_RECORD, model_digest
from process.errors import ProcessError

LOCK_FILE = ".anchorleg-convert.lock"

_COPIED = (  # configuration, tokenizer and chat template, in all their forms
    *("config.json", "generation_config.json", "tokenizer*.json", "tokenizer.model*", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tekken.json", "*.tiktoken", "chat_template*"),
)
_PARTS = "fused-*.safetensors"
_MARGIN_BYTES = 64 << 20  # for tokenizer and configuration


class ConvertError(ProcessError):
    """The model cannot be converted, or not into this folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to convert, and into what."""

    model_dir: Path  # a Hugging Face folder, a GGUF file, or a folder with one
    save_dir: Path
    rounded_to: str | None = None  # bfloat16, or None: as the model is
    overwrite: bool = False  # what another model left in save_dir


@dataclass(frozen=True, slots=True)
class Source:
    """An open model that the engine can compute."""

    place: Path
    settings: Mapping[str, Any]  # config.json
    config: LlamaConfig
    checkpoint: Checkpoint
    identity: str  # what `handoff.identity.model_digest` says of the folder that vLLM runs on
    companions: Mapping[str, bytes]  # what a daemon reads beside the weights, by file name
    stamps: Stamps  # of every file it was read from, before it was

    def rounded_to(self, wanted: str | None) -> str | None:
        """Return `wanted`, or None where the weights have no digits that it takes away."""
        forms = self.checkpoint.forms
        return wanted if any(forms[name].dtype != "BF16" for name in expected_shapes(self.config)) else None


def run(wanted: Wanted, console: Console) -> None:
    """Write the fused form; show on `console` how far it is.

    Raises:
        ConvertError: the model cannot be converted, the folder is somebody else's, or the disk is full.
        ModelError: a GGUF file cannot be read.
    """
    with ExitStack() as files:
        try:
            source = open_source(wanted.model_dir, files)
            record = Record(
                identity=source.identity,
                source=str(source.place),
                config=config_digest(source.settings),
                rounded_to=source.rounded_to(wanted.rounded_to),
                complete=False,
            )
            if not is_fused(wanted.save_dir):
                check_room(wanted.save_dir, source, record, parts(source.config))
            wanted.save_dir.mkdir(parents=True, exist_ok=True)
            with locked(wanted.save_dir):
                _convert(wanted, source, record, console)
        except ProcessError:
            raise
        except (EngineError, FileNotFoundError) as error:
            raise ConvertError(str(error)) from error
        except OSError as error:
            raise ConvertError(
                f"{error.filename or wanted.save_dir}: {error.strerror}. What is complete is kept; mend that (make room, or "
                "choose another --save-dir), and the same command goes on"
            ) from error


def open_source(place: Path, files: ExitStack) -> Source:
    """Open the model at `place` until `files` is closed, and check that the engine can compute it.

    Raises ConvertError, EngineError or FileNotFoundError naming what is missing or not computed, and the way out.
    """
    place = place.absolute()
    if not place.exists():
        raise ConvertError(f"{place} does not exist: --model-dir is a Hugging Face folder or a GGUF file")
    if is_fused(place):
        raise ConvertError(f"{place} is in the fused form already: a daemon takes it as --model-dir")
    if (gguf := _gguf(place)) is not None:
        stamps = _stamps(gguf)
        model = GgufModel(gguf)
        config = parse_config(model.config, str(gguf))
        check(model, config)
        return Source(gguf, model.config, config, model, model.identity, _of_gguf(gguf, model.config), stamps)
    stamps = _stamps(place)
    config = LlamaConfig.read(place)
    checkpoint = SafetensorsFiles(place, safetensors_paths(place), files)
    check(checkpoint, config)
    if not (tokenizer := place / "tokenizer.json").is_file():
        raise ConvertError(f"{tokenizer} is missing, and no daemon serves a model without it: save its tokenizer there")
    settings, companions = read_json(place / "config.json"), _companions(place)
    return Source(place, settings, config, checkpoint, model_digest(place), companions, stamps)


def check_room(folder: Path, source: Source, record: Record, missing: Iterable[Part]) -> None:
    """Raise ConvertError unless the parts `missing` fit the disk that `folder` is, or will be, on."""
    wanted = _MARGIN_BYTES + room(folder, {part.file: _bytes(source, part, record) for part in missing})
    disk = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if (free := shutil.disk_usage(disk).free) < wanted:
        raise ConvertError(
            f"the fused form needs {wanted / 1e9:.2f} GB in {folder}, where {free / 1e9:.2f} GB are free: make room, or choose "
            "another --save-dir"
        )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep every other conversion out of `folder`; the system gives the lock back when this process ends, however it does.

    Raises ConvertError naming the process that has it.
    """
    holder = f"anchorleg convert, process {os.getpid()} on {socket.gethostname()},"
    try:
        with alone(folder / LOCK_FILE, holder):
            yield
    except TakenError as error:
        raise ConvertError(f"{error} converts into {folder} just now: wait for it, or choose another folder") from None


def _convert(wanted: Wanted, source: Source, record: Record, console: Console) -> None:
    folder, identity, rounded_to = wanted.save_dir, record.identity, record.rounded_to
    before = _before(wanted, record)
    _remove_unfinished(folder)
    made = parts(source.config)
    with Shown(console, {part.file: _bytes(source, part, record) for part in made}) as shown:
        whole = set()
        for part in made if before is not None else ():
            if is_whole(folder, part, source.checkpoint, identity, rounded_to):
                whole.add(part.file)
                shown(part.file, "kept")
        missing = [part for part in made if part.file not in whole]
        changed = {name for name, content in source.companions.items() if not _holds(folder / name, content)}
        kept = {part.file for part in made} | source.companions.keys()
        needless = [path for path in _matching(folder, *_COPIED, _PARTS) if path.name not in kept]
        if before is None or not before.complete or missing or changed or needless:
            check_room(folder, source, record, missing)
            record.write(folder)  # first: it keeps daemons from what follows
            for path in needless:
                path.unlink()
            for name in sorted(changed):
                with replacing(folder / name) as file:
                    file.write(source.companions[name])
            for part in missing:
                write_part(folder, part, source.checkpoint, identity, rounded_to)
                shown(part.file, "written")
            if not _is_unchanged(source):
                for part in missing:  # the digest is made of samples: it need not tell these from those of the changed model
                    (folder / part.file).unlink()
                raise ConvertError(f"{source.place} changed while it was read: run the same command again, with --overwrite")
        if config_digest(read_json(folder / "config.json")) != record.config:
            raise ConvertError(f"{folder / 'config.json'} changed while this ran: run the same command again")
        if read_record(folder) != (complete := replace(record, complete=True)):
            complete.write(folder)
    console.print(f"{folder} serves a daemon as --model-dir; its identity is {identity}", highlight=False, soft_wrap=True)


def _before(wanted: Wanted, record: Record) -> Record | None:
    """Return the record of an earlier run for the same model, None where everything is to be written anew."""
    folder = wanted.save_dir
    if not is_fused(folder):
        foreign = sorted(
            path.name for path in folder.iterdir() if not path.name.startswith((".anchorleg-", f".{FUSED_RECORD}"))
        )
        if foreign:
            raise ConvertError(f"{folder} holds {foreign[0]}, which no conversion wrote: choose a new or empty --save-dir")
        return None
    try:
        before = read_record(folder)
    except EngineError as error:
        if wanted.overwrite:
            return None
        raise ConvertError(f"{error}, with --overwrite") from error
    if replace(before, complete=False, source=record.source) == record:
        return before
    if wanted.overwrite:
        return None
    raise ConvertError(f"{folder} holds {_told(before)}, not {_told(record)}: choose another --save-dir, or say --overwrite")


def _told(record: Record) -> str:
    rounded = f", rounded to {record.rounded_to}" if record.rounded_to else ""
    return f"{record.source} (identity {record.identity}{rounded})"


def _companions(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in _matching(folder, *_COPIED)}


def _of_gguf(gguf: Path, settings: Mapping[str, Any]) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory(prefix="anchorleg-tokenizer-") as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        try:
            save_tokenizer(gguf, folder)
        except Exception as error:  # transformers raises many kinds, and tokenizers this one
            raise ConvertError(
                f"transformers makes no tokenizer of {gguf} ({error!r}): install a newer one, or convert a Hugging Face folder"
            ) from error
        return _companions(folder)


def _holds(path: Path, content: bytes) -> bool:
    return path.is_file() and path.read_bytes() == content


def _matching(folder: Path, *patterns: str) -> list[Path]:
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return sorted(found)


def _stamps(place: Path) -> Stamps:
    paths = [place] if place.is_file() else _matching(place, *_COPIED, "*.safetensors", "*.safetensors.index.json")
    return stamps_of(paths)


def _is_unchanged(source: Source) -> bool:
    same = _stamps(source.place) == source.stamps
    return same and (source.place.is_file() or model_digest(source.place) == source.identity)


def _remove_unfinished(folder: Path) -> None:
    """Remove what a run that was killed had begun."""
    for path in _matching(folder, *map(PARTIAL.format, (*_COPIED, _PARTS, FUSED_RECORD))):
        path.unlink()


def _bytes(source: Source, part: Part, record: Record) -> int:
    return part_bytes(part, source.checkpoint, record.identity, record.rounded_to)


def _gguf(place: Path) -> Path | None:
    """Return the GGUF file that `place` is or holds, None for a Hugging Face folder."""
    if place.is_file():
        if place.suffix != ".gguf":
            raise ConvertError(f"{place} is no .gguf file: --model-dir is a Hugging Face folder or a GGUF file")
        return place
    found = sorted(place.glob("*.gguf"))
    if not found or any(place.glob("*.safetensors")):
        return None
    if len(found) > 1:
        raise ConvertError(f"{place} holds {len(found)} GGUF files: name one, such as --model-dir {found[0]}")
    return found[0]
