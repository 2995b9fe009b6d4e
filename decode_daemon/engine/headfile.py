"""The file of a draft head: safetensors, with what says for which model it was made in its metadata.

The embedding, the final norm and the rows of the vocabulary's head are the model's own and not in the file. What the tensors
compute is in `head.py`.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from decode_daemon.engine.protocol import EngineError
from decode_daemon.engine.tensorfile import replacing
from decode_daemon.engine.weights import Weights

VERSION = 1

_INNER = 16  # what a block's inner size is a multiple of, as the native step wants it
_SAMPLED_ROWS = 64  # of the embedding and of the head


@dataclass(frozen=True, slots=True)
class Block:
    """A residual SwiGLU block; matrices are [outputs, inputs]."""

    gate_up: torch.Tensor  # [2 * inner, hidden]
    down: torch.Tensor  # [hidden, inner]


@dataclass(frozen=True, slots=True)
class HeadFile:
    """A draft head as it is stored."""

    model: str  # `fingerprint` of the model's weights
    ids: torch.Tensor  # int32 [drafted], ascending: the tokens that it can draft
    join: torch.Tensor  # [hidden, (states + tokens) * hidden]: of the last states and then the last embeddings, latest first
    states: int
    blocks: tuple[Block, ...]
    acceptance: tuple[float, ...]  # share of n-th tokens that were right in held-out chats, of those whose earlier ones were

    def save(self, path: Path) -> None:
        """Write it to `path`, where it appears whole; raises OSError when that cannot be."""
        tensors = {"ids": self.ids, "join": self.join}
        for nth, block in enumerate(self.blocks):
            tensors |= {f"blocks.{nth}.gate_up": block.gate_up, f"blocks.{nth}.down": block.down}
        rates = json.dumps([round(rate, 4) for rate in self.acceptance])
        about = {"version": str(VERSION), "model": self.model, "states": str(self.states), "acceptance": rates}
        with replacing(path) as file:
            file.write(save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, about))

    @classmethod
    def read(cls, path: Path) -> "HeadFile":
        """Read a file that `save` wrote; raises EngineError naming the file and what is wrong with it."""
        # Copies: what is mapped changes with the file.
        about, tensors = _opened(path, lambda file: {name: file.get_tensor(name).clone() for name in file.keys()})  # noqa: SIM118 (no mapping)
        try:
            count = (len(tensors) - 2) // 2
            if len(tensors) != 2 + 2 * count:
                raise ValueError(f"{len(tensors)} tensors")
            blocks = tuple(Block(tensors[f"blocks.{nth}.gate_up"], tensors[f"blocks.{nth}.down"]) for nth in range(count))
            rates = tuple(map(float, json.loads(about["acceptance"])))
            head = cls(about["model"], tensors["ids"], tensors["join"], int(about["states"]), blocks, rates)
        except (KeyError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise EngineError(f"{path} is no whole draft head ({error!r}): make it again with benchmarks.head") from error
        head._check(path)
        return head

    @property
    def hidden(self) -> int:
        """The size of the model's states."""
        return self.join.shape[0]

    @property
    def tokens(self) -> int:
        """How many of the last tokens it drafts from."""
        return self.join.shape[1] // self.hidden - self.states

    def _check(self, path: Path) -> None:
        wrong = [] if self.acceptance and all(0 <= rate <= 1 for rate in self.acceptance) else [f"acceptance {self.acceptance}"]
        if self.ids.dtype != torch.int32 or self.ids.dim() != 1 or not len(self.ids) or int(self.ids.min()) < 0:
            wrong.append(f"ids {self.ids.dtype} {list(self.ids.shape)}")
        matrices = [self.join, *(matrix for block in self.blocks for matrix in (block.gate_up, block.down))]
        if any(matrix.dim() != 2 or not matrix.numel() or not matrix.is_floating_point() for matrix in matrices):
            wrong.append(f"matrices {[list(matrix.shape) for matrix in matrices]}")
        else:
            hidden = self.hidden
            if self.join.shape[1] % hidden or self.states < 1 or self.tokens < 1:
                wrong.append(f"join {list(self.join.shape)}")
            for nth, block in enumerate(self.blocks):
                inner = self.blocks[0].down.shape[1]
                if block.down.shape != (hidden, inner) or block.gate_up.shape != (2 * inner, hidden) or inner % _INNER:
                    wrong.append(f"blocks.{nth} {list(block.gate_up.shape)} and {list(block.down.shape)}")
        if wrong:
            raise EngineError(f"{path}: the parts do not fit each other: {', '.join(wrong)}")


def model_of(path: Path) -> str:
    """Return the fingerprint of the model that the head in `path` is for; raises EngineError where it cannot be read."""
    return _opened(path, lambda file: {})[0].get("model", "")


def _opened(path: Path, read: Callable[[Any], dict[str, torch.Tensor]]) -> tuple[Mapping[str, str], dict[str, torch.Tensor]]:
    """Return the metadata of a safetensors file, and what `read` reads from it while it is open."""
    try:
        with safe_open(path, framework="pt") as file:
            about, tensors = file.metadata() or {}, read(file)
    except (OSError, SafetensorError) as error:
        raise EngineError(f"{path} cannot be opened as safetensors: {error}") from error
    if about.get("version") != str(VERSION):
        raise EngineError(f"{path}: version is {about.get('version')}, this engine reads draft heads of version {VERSION}")
    return about, tensors


def fingerprint(weights: Weights) -> str:
    """Return 16 hex digits that tell a model's weights from others': of its final norm and of some rows of every matrix.

    The rows are evenly spread ones of embedding and head, and each layer's first, as bfloat16: a folder, its fused form and
    either dtype it is loaded in have the same. Weights that differ elsewhere only are taken for the same; a head for them may
    be right less often, no more.
    """
    digest = hashlib.sha256(f"{tuple(weights.embedding.shape)} {len(weights.layers)}".encode())
    step = max(1, weights.embedding.shape[0] // _SAMPLED_ROWS)
    parts = [weights.final_norm, weights.embedding[::step], weights.head[::step]]
    for layer in weights.layers:
        parts += [matrix[0] for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    for part in parts:
        digest.update(part.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
