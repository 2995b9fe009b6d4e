"""Chooses what computes the steps of a model: a GPU, native code, or PyTorch, the first that can; it says which, and why."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

import structlog
import torch

from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.cpu.build import BuildError, library
from decode_daemon.engine.cpu.cores import physical_cores, usable_cores
from decode_daemon.engine.cpu.native import INSTRUCTIONS, Library, NativeModel, unsupported
from decode_daemon.engine.cuda.quantized import WeightsKind, check_quantizable
from decode_daemon.engine.model import LlamaModel
from decode_daemon.engine.protocol import EngineError
from decode_daemon.engine.weights import Weights

log = structlog.get_logger(__name__)

StepKind = Literal["auto", "cuda", "native", "torch"]


class StepModel(Protocol):
    """The weights and the KV cache of one sequence, and how a token becomes the next one's logits."""

    config: LlamaConfig
    context_tokens: int
    widest: int  # rows of the widest step that gives each row's logits bit for bit as a step of that row alone does

    @property
    def cache(self) -> torch.Tensor:
        """The KV cache: [layers, 2, kv_heads, context_tokens, head_dim], K (rotated) before V, allocated once.

        Ask for it each time before writing to it: a step may be under way from what it held before.
        """
        ...

    def forward(self, ids: torch.Tensor, position: int) -> torch.Tensor:
        """Store the KV of `ids` at `position` and on; return the logits after each, [width, vocab] in the weights' dtype.

        `ids` is int64 [width]. Positions before `position` must hold the sequence so far; later ones are not read.
        Raises EngineError when the last id falls outside the context.
        """
        ...

    def greedy(self, token: int, position: int) -> int | None:
        """As `forward` of one id; return the id of its largest logit (the lowest of equal ones), None if one is not finite.

        May begin the step that follows from that id: ask for `bests` where another one may follow.
        """
        ...

    def bests(self, ids: Sequence[int], position: int) -> list[int | None]:
        """As `forward` of `ids`, at most `widest`; return for each row what `greedy` returns."""
        ...

    def hidden(self, rows: int) -> torch.Tensor:
        """Return the last step's first `rows` (at most `widest`) as they leave the last layer, before the final norm.

        [rows, hidden] in the weights' dtype, the caller's to keep: what a draft head continues from.
        """
        ...


def choose_step(
    config: LlamaConfig,
    weights: Weights,
    context_tokens: int,
    *,
    step: StepKind = "auto",
    threads: int | None = None,
    pin: bool = True,
    cache_dir: Path | None = None,
    tensor_parallel: int = 1,
    weights_as: WeightsKind = "as-is",
) -> StepModel:
    """Return the fastest `StepModel` this machine can run, and log the choice in one line.

    `step` "cuda", "native" and "torch" allow only that one. `threads` None means one for each physical core the process may
    use. `pin` keeps each native thread on a core of its own while it computes, when together they take every core of the
    process; which of more cores are free only the machine's owner knows (`taskset`, cpusets). `cache_dir` is where libraries
    are built. Several GPUs compute each step together with `tensor_parallel` above 1, and nothing else then does. The layers'
    matrices are quantized with `weights_as` "fp8", which only the CUDA step can. Raises EngineError when "cuda", "native" or
    "fp8" is wanted and impossible, naming the reason.
    """
    if weights_as == "fp8":
        check_quantizable(config, tensor_parallel, step)
    reasons: list[str] = []
    if tensor_parallel > 1 and step not in ("auto", "cuda"):
        raise EngineError(f"tensor_parallel is {tensor_parallel}, which only the CUDA step can: choose step cuda, not {step}")
    if step in ("auto", "cuda"):
        try:
            return _cuda(config, weights, context_tokens, tensor_parallel, weights_as)
        except _NoCudaError as error:
            if weights_as == "fp8":
                raise EngineError(f"fp8 weights need the CUDA step, which is not possible here: {error}") from error
            if step == "cuda" or tensor_parallel > 1:
                raise EngineError(f"the CUDA step is not possible here: {error}") from error
            if torch.cuda.is_available():  # without a GPU there is nothing to explain
                reasons.append(str(error))
    if step in ("auto", "native"):
        try:
            return _native(config, weights, context_tokens, threads or usable_cores(), pin, cache_dir, reasons)
        except BuildError as error:
            if step == "native":
                raise EngineError(f"the native step is not possible here: {error}") from error
            reasons.append(str(error))
    level = log.info if step == "torch" else log.warning
    why = "; ".join(reasons) or "chosen by the settings"
    level("decode step", step="torch", why=why, threads=torch.get_num_threads())
    return LlamaModel(config, weights, context_tokens)


class _NoCudaError(Exception):
    """There can be no CUDA step here: the message says why."""


def _cuda(config: LlamaConfig, weights: Weights, context_tokens: int, ranks: int, weights_as: WeightsKind) -> StepModel:
    """Return the CUDA model; raises _NoCudaError when there can be none here."""
    if not torch.cuda.is_available():
        raise _NoCudaError("PyTorch sees no CUDA device")
    try:
        # Triton comes with PyTorch's CUDA builds only, and takes a second to import.
        from decode_daemon.engine.cuda.leader import beside
        from decode_daemon.engine.cuda.model import CudaModel, unsupported
    except ImportError as error:
        raise _NoCudaError(f"Triton cannot be imported ({error}): install the triton that PyTorch names") from error
    device = torch.device("cuda", torch.cuda.current_device())
    if ranks > 1 and ranks > torch.cuda.device_count():
        there = torch.cuda.device_count()
        raise _NoCudaError(f"tensor_parallel is {ranks}, and PyTorch sees {there} CUDA devices (CUDA_VISIBLE_DEVICES)")
    for rank in range(ranks):
        if reason := unsupported(config, weights.embedding.dtype, beside(device, rank)):
            raise _NoCudaError(reason)
    try:
        model = CudaModel(config, weights, context_tokens, device=device, ranks=ranks, weights_as=weights_as)
    except RuntimeError as error:  # of CUDA, of the ring, or of Triton, which needs a C compiler to launch
        raise _NoCudaError(str(error)) from error
    name = torch.cuda.get_device_name(device)
    log.info(
        "decode step",
        step="cuda",
        why="this GPU runs it",
        device=name,
        gpus=ranks,
        weights=weights_as,
        products=model.products,
    )
    return model


def _native(
    config: LlamaConfig,
    weights: Weights,
    context_tokens: int,
    threads: int,
    pin: bool,
    cache_dir: Path | None,
    reasons: list[str],
) -> NativeModel:
    """Return the native model; raises BuildError when there can be none here. `reasons` speak against faster ones."""
    if reason := unsupported(config):
        raise BuildError(reason)
    path = library(cache_dir)
    try:
        loaded = Library(path)
    except OSError as error:
        raise BuildError(f"{path} cannot be loaded ({error}): remove it, and it is built again") from error
    instructions = loaded.instructions()
    if instructions is None:
        raise BuildError(f"this CPU has none of {', '.join(INSTRUCTIONS)}")
    pinned = pin and threads == len(physical_cores())
    model = NativeModel(config, weights, context_tokens, library=loaded, instructions=instructions, threads=threads, pin=pinned)
    log.info(
        "decode step",
        step="native",
        why="; ".join([*reasons, "this CPU runs it"]),
        instructions=instructions,
        threads=threads,
        pinned=pinned,
        library=str(path),
    )
    return model
