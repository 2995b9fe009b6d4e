"""safetensors files written piece by piece: a header that says where everything will lie, then one tensor after another.

The safetensors package writes what is in memory as a whole; a model need not be, and a file's size and header are wanted
before its data are there. The format: https://github.com/huggingface/safetensors#format
"""

import fcntl
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import torch

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}  # those the engine reads, by safetensors' names

Stamps = Mapping[str, tuple[int, int, int, int]]  # device, inode, bytes and time of change of each file, by its name

_LENGTH_BYTES = 8
_LOCK_TRIES = 10  # one is lost only when another holder ends just between two system calls


class TakenError(Exception):
    """Another process has the lock; the message is what it calls itself."""


@dataclass(frozen=True, slots=True)
class TensorForm:
    """What a tensor is before its values are there."""

    dtype: str  # safetensors' name
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Return its size in a file; raises KeyError for a dtype that is not in DTYPES."""
        return DTYPES[self.dtype].itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """A safetensors file without its data: `forms` in the order in which they lie, one right behind the other."""

    forms: Mapping[str, TensorForm]
    metadata: Mapping[str, str] = field(default_factory=dict)
    alignment: int = 8  # of the first tensor in the file, in bytes

    @cached_property
    def header(self) -> bytes:
        """Everything before the first tensor: the length of the JSON text, and that text, padded with spaces."""
        entries: dict[str, object] = {"__metadata__": dict(self.metadata)} if self.metadata else {}
        for name, (begin, end) in self.places.items():
            form = self.forms[name]
            entries[name] = {"dtype": form.dtype, "shape": form.shape, "data_offsets": [begin, end]}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(_LENGTH_BYTES + len(text)) % self.alignment)
        return len(text).to_bytes(_LENGTH_BYTES, "little") + text

    @cached_property
    def places(self) -> dict[str, tuple[int, int]]:
        """Where each tensor begins and ends, in bytes from the end of the header."""
        places, at = {}, 0
        for name, form in self.forms.items():
            places[name] = (at, at + form.bytes)
            at += form.bytes
        return places

    @property
    def size(self) -> int:
        """The whole file's size in bytes."""
        return len(self.header) + sum(form.bytes for form in self.forms.values())


def raw(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of `tensor` as they lie in a file: row-major, little-endian as every CPU that torch runs on."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data


def write(file: BinaryIO, layout: Layout, tensors: Iterable[torch.Tensor]) -> None:
    """Write the header, then `tensors` as they come: those of `layout.forms`, in that order.

    Raises ValueError naming the tensor that has another shape or dtype than `layout` says, OSError when the disk is full.
    """
    file.write(layout.header)
    for (name, form), tensor in zip(layout.forms.items(), tensors, strict=True):
        if tuple(tensor.shape) != form.shape or tensor.dtype != DTYPES[form.dtype]:
            raise ValueError(f"tensor {name} is {tensor.dtype} {list(tensor.shape)}, not {form}")
        file.write(raw(tensor))


def read_header(path: Path) -> tuple[bytes, Mapping[str, str]]:
    """Return a safetensors file's header, length included, and the metadata in it.

    Raises OSError when it cannot be read, ValueError when it is none.
    """
    with path.open("rb") as file:
        length = file.read(_LENGTH_BYTES)
        size = int.from_bytes(length, "little")
        if len(length) < _LENGTH_BYTES or size > path.stat().st_size - _LENGTH_BYTES:
            raise ValueError(f"{path} is shorter than its header says")
        text = file.read(size)
    entries = json.loads(text)
    metadata = entries.get("__metadata__") if isinstance(entries, dict) else None
    return length + text, metadata if isinstance(metadata, dict) else {}


PARTIAL = ".{}.partial"  # the name that a file has until it is complete


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file to write; `path` becomes it when the block ends, and stays what it was when the block fails.

    What has the name is on the disk: it survives the machine's crash, too. Writers of one path must exclude each other.
    """
    partial = path.with_name(PARTIAL.format(path.name))
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def alone(path: Path, holder: str) -> Iterator[None]:
    """Hold the lock file `path`, in which `holder` says who does; the system gives it back when this process ends, however.

    Raises TakenError when another process has it.
    """
    for _ in range(_LOCK_TRIES):
        with path.open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise TakenError(file.read().strip() or "another process") from None
            if not _is_at(path, file.fileno()):
                continue  # its holder removed it while it was being opened
            file.truncate(0)
            file.write(holder)
            file.flush()
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return
    raise TakenError("one process after another")


def stamps_of(paths: Iterable[Path]) -> Stamps:
    """Return what tells, when it is asked for again, whether one of `paths` was written or replaced."""
    stats = {path.name: path.stat() for path in paths}
    return {name: (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
