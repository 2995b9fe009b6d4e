"""The native step as Python sees it: the C interface of api.cpp, and a model that computes its steps with it."""

import ctypes
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch

from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.cpu.cores import physical_cores
from decode_daemon.engine.model import check_positions, empty_cache, rope_tables
from decode_daemon.engine.protocol import EngineError
from decode_daemon.engine.weights import LayerWeights, Weights

MAX_WIDTH = 8  # step.h
INSTRUCTIONS = ("avx512", "avx2")  # best first

_VECTOR = 16


class _Shape(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim")),
        *((name, ctypes.c_int32) for name in ("vocab", "context", "bfloat16")),
        ("eps", ctypes.c_float),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in LayerWeights.__dataclass_fields__]


class _Tensors(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("embedding", "final_norm", "head", "cos", "sin", "cache", "logits")]


class Library:
    """The loaded shared library."""

    def __init__(self, path: Path) -> None:
        """Load the library at `path`; raises OSError when the system cannot."""
        library = ctypes.CDLL(str(path))
        self.supports = library.anchorleg_supports
        self.supports.argtypes = [ctypes.c_char_p]
        self.open = library.anchorleg_open
        self.open.restype = ctypes.c_void_p
        self.open.argtypes = [
            *(ctypes.POINTER(kind) for kind in (_Shape, _Tensors, _Layer)),
            ctypes.c_char_p,
            ctypes.c_int,
            ctypes.c_void_p,
        ]
        self.step = library.anchorleg_step
        self.step.restype = None
        self.step.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
        self.hidden = library.anchorleg_hidden
        self.hidden.restype = ctypes.c_void_p
        self.hidden.argtypes = [ctypes.c_void_p]
        self.close = library.anchorleg_close
        self.close.restype = None
        self.close.argtypes = [ctypes.c_void_p]

    def instructions(self) -> str | None:
        """Return the best set of instructions that both the library and this CPU have, None when there is none."""
        return next((name for name in INSTRUCTIONS if self.supports(name.encode())), None)


def unsupported(config: LlamaConfig) -> str | None:
    """Return what keeps the native step from computing a model of this shape, None when nothing does."""
    for name in ("hidden", "intermediate", "head_dim"):
        if (value := getattr(config, name)) % _VECTOR:
            return f"{name} is {value}, the native step needs a multiple of {_VECTOR}"
    return None


class NativeModel:
    """The weights and the KV cache of one sequence, with steps in C++; a `StepModel`.

    A row of logits is the same bit for bit whatever the width of its step and the number of threads.
    """

    widest = MAX_WIDTH

    def __init__(
        self,
        config: LlamaConfig,
        weights: Weights,
        context_tokens: int,
        *,
        library: Library,
        instructions: str,
        threads: int,
        pin: bool,
    ) -> None:
        """Allocate the cache and start the threads, which end with this object.

        `pin` keeps thread n on the n-th physical core of the process while a step runs, where there are as many.
        Raises EngineError when the system refuses memory or threads.
        """
        self.config = config
        self.context_tokens = context_tokens
        self.cache = empty_cache(config, weights.embedding.dtype, weights.embedding.device, context_tokens)
        dtype, half = weights.embedding.dtype, config.head_dim // 2
        cos, sin = rope_tables(config, context_tokens)
        # The second halves repeat the first; the first half of sin carries the sign that `rotate_` wants.
        tables = cos[:, :half].to(dtype).contiguous(), sin[:, half:].to(dtype).contiguous()
        self._logits = torch.zeros(MAX_WIDTH, config.vocab_size, dtype=dtype)
        self._kept = (weights, tables)  # the library holds bare pointers to them
        self._step = library.step
        self._ids = (ctypes.c_int64 * MAX_WIDTH)()
        self._best = (ctypes.c_int64 * MAX_WIDTH)()
        tensors = _Tensors(
            *map(_address, (weights.embedding, weights.final_norm, weights.head, *tables, self.cache, self._logits))
        )
        layers = (_Layer * config.layers)(
            *(
                _Layer(*(_address(getattr(layer, name)) for name in LayerWeights.__dataclass_fields__))
                for layer in weights.layers
            )
        )
        cores = physical_cores()
        places = (ctypes.c_int * threads)(*cores[:threads]) if pin and threads <= len(cores) else None
        handle = library.open(_shape(config, context_tokens, dtype), tensors, layers, instructions.encode(), threads, places)
        if handle is None:
            raise EngineError(f"the native step cannot have {threads} threads and its working memory: lower --threads")
        self._handle = ctypes.c_void_p(handle)
        weakref.finalize(self, library.close, self._handle)
        rows = (ctypes.c_float * (MAX_WIDTH * config.hidden)).from_address(library.hidden(self._handle))
        self._hidden = torch.frombuffer(rows, dtype=torch.float32).view(MAX_WIDTH, config.hidden)

    def forward(self, ids: torch.Tensor, position: int) -> torch.Tensor:
        """Store the KV of `ids` at `position` and on; return the logits after each; see `StepModel.forward`."""
        check_positions(position, ids.shape[0], self.context_tokens)
        tokens = ids.tolist()
        rows = []
        for done in range(0, len(tokens), MAX_WIDTH):
            part = tokens[done : done + MAX_WIDTH]
            self._run(part, position + done)
            rows.append(self._logits[: len(part)].clone())
        return torch.cat(rows) if len(rows) > 1 else rows[0]

    def greedy(self, token: int, position: int) -> int | None:
        """Return the id of the largest logit after `token`; see `StepModel.greedy`."""
        return self.bests((token,), position)[0]

    def bests(self, ids: Sequence[int], position: int) -> list[int | None]:
        """Return the id of the largest logit after each of `ids`, at most MAX_WIDTH; see `StepModel.bests`."""
        check_positions(position, len(ids), self.context_tokens)
        self._run(ids, position)
        return [best if best >= 0 else None for best in self._best[: len(ids)]]

    def hidden(self, rows: int) -> torch.Tensor:
        """Return the last step's rows before the final norm; see `StepModel.hidden`."""
        # Float32 values that are rounded to the weights' dtype already.
        return self._hidden[:rows].to(self.cache.dtype, copy=True)

    def _run(self, ids: Sequence[int], position: int) -> None:
        for row, token in enumerate(ids):
            if not 0 <= token < self.config.vocab_size:
                raise EngineError(f"token {token} is outside the vocabulary of {self.config.vocab_size} ids")
            self._ids[row] = token
        self._step(self._handle, self._ids, len(ids), position, self._best)


def _shape(config: LlamaConfig, context_tokens: int, dtype: torch.dtype) -> _Shape:
    return _Shape(
        config.layers,
        config.hidden,
        config.intermediate,
        config.heads,
        config.kv_heads,
        config.head_dim,
        config.vocab_size,
        context_tokens,
        dtype == torch.bfloat16,
        config.rms_eps,
    )


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
