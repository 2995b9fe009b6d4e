"""A tiny model on each native step, with and without speculation, over KV of the prompt's own."""

from collections.abc import Callable
from pathlib import Path

import torch

from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.cpu.build import library
from decode_daemon.engine.cpu.native import Library, NativeModel
from decode_daemon.engine.loop import LlamaEngine
from decode_daemon.engine.protocol import DecodeParams, EngineError, FinishReason, Step, TokenLogprobs
from decode_daemon.engine.weights import load_weights

FIRST = 7
CONTEXT = 64
VOCAB = 97

# The ids, their logprobs, how the answer ended, and the error that broke it off.
Answer = tuple[list[int], list[TokenLogprobs], FinishReason | None, str]


def native_model(folder: Path, dtype: torch.dtype, instructions: str) -> NativeModel:
    """One thread, so that a busy machine does not keep threads waiting for each other."""
    config = LlamaConfig.read(folder)
    return NativeModel(
        config,
        load_weights(folder, config, dtype),
        CONTEXT,
        library=Library(library()),
        instructions=instructions,
        threads=1,
        pin=False,
    )


def land(engine: LlamaEngine, prompt: list[int]) -> None:
    """Fill the prompt's KV with values of its own."""
    generator = torch.Generator().manual_seed(sum(prompt))
    for cache in engine.kv_target(len(prompt)):
        cache.copy_(torch.randn(cache.shape, generator=generator))


def told(
    engine: LlamaEngine, prompt: list[int], params: DecodeParams, cancelled: Callable[[], bool] = lambda: False
) -> tuple[Answer, list[Step]]:
    """What the engine answers after FIRST, and the steps it took."""
    land(engine, prompt)
    steps: list[Step] = []
    error = ""
    try:
        for step in engine.decode(prompt, FIRST, params, cancelled):
            steps.append(step)
    except EngineError as failure:
        error = str(failure)
    ids = [token for step in steps for token in step.ids]
    logprobs = [one for step in steps for one in step.logprobs]
    assert all(step.finish is None for step in steps[:-1])
    assert all(0 <= step.accepted <= min(step.drafted, len(step.ids)) for step in steps)
    return (ids, logprobs, steps[-1].finish if steps else None, error), steps


def answered(engine: LlamaEngine, prompt: list[int], params: DecodeParams) -> Answer:
    """What the engine answers after FIRST."""
    return told(engine, prompt, params)[0]
