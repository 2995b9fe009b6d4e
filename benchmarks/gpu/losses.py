"""Whether a killed rank is told of in seconds, while it computes and while nobody asks, and whether everything then ends.

Each case has a process of its own: one that hangs is killed, with the ranks it started, and fails its checks.
"""

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.gpu.checks import Check
from benchmarks.gpu.shapes import random_weights
from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.cuda.model import CudaModel
from decode_daemon.engine.loop import LlamaEngine
from decode_daemon.engine.protocol import EngineLostError
from decode_daemon.runner import EngineRunner, Timings

_CONTEXT = 2048
_COMPUTING_S = 0.5  # of steps before the kill
_START_S = 180.0
_BOUND_S = 60.0  # for an error, and for an end
_TOLD_S = 5.0  # from the kill to an EngineLostError
_GONE_S = 20.0  # from then to the end of rank 0's process

Lose = Callable[[CudaModel, Callable[[], None]], str]


def losses(config: LlamaConfig, gpus: int, *, overlap: bool) -> list[Check]:
    """Kill a rank in mid-decode and one of an idle engine; return what came of it."""
    cases = {"a rank killed in mid-decode": _in_mid_decode, "a rank killed while idle": _while_idle}
    return [check for name, lose in cases.items() for check in _case(name, lose, config, gpus, overlap)]


def _case(name: str, lose: Lose, config: LlamaConfig, gpus: int, overlap: bool) -> list[Check]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(lose, config, gpus, overlap, theirs), name=name)
    with theirs:
        process.start()
    told = gone = float("inf")
    others: list[int] = _said(ours, _START_S) or []
    try:
        if others:
            told, error = _said(ours, _BOUND_S) or (told, "nothing")
            print(f"{name}: {error}", flush=True)
            began = time.monotonic()
            process.join(_BOUND_S)
            gone = gone if process.is_alive() else time.monotonic() - began
    finally:
        process.kill()
        process.join(_BOUND_S)
        left = sum(_killed(pid) for pid in others)
        ours.close()
    return [
        Check(name, "seconds until an error that names it", told, _TOLD_S),
        Check(name, "seconds from then to the end of the process", gone, _GONE_S),
        Check(name, "other ranks' processes left", left, 0),
    ]


def _run(lose: Lose, config: LlamaConfig, gpus: int, overlap: bool, pipe: Connection) -> None:
    """Be rank 0: say who the others are, and then how long it took to be told of one that was killed, and in which words."""
    device = torch.device("cuda", 0)
    weights = random_weights(config, torch.bfloat16, device)
    model = CudaModel(config, weights, _CONTEXT, device=device, widths=(1,), overlap=overlap, ranks=gpus)
    others = sorted((child.name, child.pid) for child in multiprocessing.active_children() if child.pid is not None)
    pipe.send([pid for _, pid in others])
    victim, killed = others[-1][1], []

    def kill() -> None:
        killed.append(time.monotonic())
        os.kill(victim, signal.SIGKILL)

    error = lose(model, kill)
    seconds = time.monotonic() - killed[0]
    pipe.send((seconds if f"(pid {victim}) ended with exit code -9" in error else float("inf"), error))


def _in_mid_decode(model: CudaModel, kill: Callable[[], None]) -> str:
    killer = threading.Timer(_COMPUTING_S, kill)
    killer.start()
    end = time.monotonic() + _COMPUTING_S + _BOUND_S
    token: int | None = 1
    try:
        while time.monotonic() < end:
            for position in range(_CONTEXT):
                token = model.greedy(token or 1, position)
    except EngineLostError as error:
        return str(error)
    finally:
        killer.join()
    return "no error"


def _while_idle(model: CudaModel, kill: Callable[[], None]) -> str:
    model.greedy(1, 0)  # so that other ranks have written KV

    async def waited() -> str:
        runner = EngineRunner(LlamaEngine(model), Timings(lambda _: None, lambda *_: None))
        try:
            kill()
            return str(await asyncio.wait_for(runner.lost(), _BOUND_S))
        except TimeoutError:
            return "no error"
        finally:
            runner.close()

    return asyncio.run(waited())


def _said(pipe: Connection, seconds: float) -> Any:
    """Return what is said within `seconds`, None if nothing is."""
    with suppress(EOFError):
        return pipe.recv() if pipe.poll(seconds) else None
    return None


def _killed(pid: int) -> bool:
    """End a process; whether it was there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True
