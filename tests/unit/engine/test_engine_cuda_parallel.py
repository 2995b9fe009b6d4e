"""A step that two ranks compute together: two processes on the CPU, kernels interpreted, gloo between them."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest
import torch

from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.cuda.plan import Plan
from decode_daemon.engine.cuda.shards import Shard
from decode_daemon.engine.cuda.tiles import Tile
from decode_daemon.engine.model import LlamaModel
from decode_daemon.engine.protocol import EngineError
from decode_daemon.engine.weights import Weights
from tests.unit.engine.test_engine_cuda_step import CONTEXT, PLAIN, PROMPT, random_weights

pytest.importorskip("triton")

_BOUND_S = 60.0
LLAMA = replace(PLAIN, heads=6, kv_heads=2)  # and 37 ids, of which one rank has 19 and the other 18
SMALL = replace(LLAMA, layers=1, heads=2)
FAMILIES = {
    "llama": LLAMA,
    "qwen2": replace(SMALL, heads=4, qkv_bias=True),
    "tied qwen3": replace(SMALL, heads=4, kv_heads=4, qk_norm=True, tied=True),
}


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Executor]:
    """A process that is rank 0, in which Triton interprets kernels, as it does in the processes it starts."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            patch.setenv("OMP_NUM_THREADS", "1")
            process.submit(torch.set_num_threads, 1).result()
        yield process


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_compute_what_one_does(interpreter: Executor, family: str) -> None:
    interpreter.submit(check_step, family).result(_BOUND_S)


def test_a_row_is_the_same_at_every_width(interpreter: Executor) -> None:
    interpreter.submit(check_widths).result(_BOUND_S)


def test_of_equal_logits_the_lowest_id_wins_and_one_that_is_not_finite_leaves_none(interpreter: Executor) -> None:
    interpreter.submit(check_best).result(_BOUND_S)


def test_a_rank_that_dies_is_named_and_everything_ends(interpreter: Executor) -> None:
    interpreter.submit(check_death).result(_BOUND_S)


def test_what_goes_wrong_on_another_rank_is_told(interpreter: Executor) -> None:
    interpreter.submit(check_words).result(_BOUND_S)


def test_other_ranks_end_with_the_first() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        first = context.Process(target=hold_until_killed, args=(theirs,))
        first.start()
    try:
        assert ours.poll(_BOUND_S)
        (other,) = ours.recv()
    finally:
        first.kill()
        first.join()
    until_gone([other])


@contextmanager
def two_ranks(config: LlamaConfig, weights: Weights) -> Iterator[Any]:
    from decode_daemon.engine.cuda.model import CudaModel

    device, plan = torch.device("cpu"), Plan(tiles(config))
    with closing(CudaModel(config, weights, CONTEXT, device=device, overlap=False, plan=plan, ranks=2)) as model:
        yield model
    assert children() == []


def tiles(config: LlamaConfig) -> dict[tuple[int, int], Tile]:
    """Return tiles of so many rows that each product is a program or two: the interpreter takes its time for each."""
    tile = Tile(rows=16, columns=16, depth=1, warps=1)
    parts = [Shard(rank, 2, config).config for rank in range(2)]
    shapes = [(part.hidden, (part.heads + 2 * part.kv_heads) * part.head_dim) for part in parts]
    shapes += [(part.heads * part.head_dim, part.hidden) for part in parts]
    shapes += [(part.hidden, 2 * part.intermediate) for part in parts]
    shapes += [(part.intermediate, part.hidden) for part in parts]
    shapes += [(part.hidden, part.vocab_size) for part in parts]
    return dict.fromkeys(shapes, tile)


@contextmanager
def injected(config: LlamaConfig) -> Iterator[tuple[Any, LlamaModel, torch.Tensor]]:
    """Return two ranks and the PyTorch model, both with the KV of PROMPT positions, and ids to go on with."""
    weights = random_weights(config)
    reference = LlamaModel(config, weights, CONTEXT)
    ids = torch.randint(0, config.vocab_size, (PROMPT + 8,), generator=torch.Generator().manual_seed(1))
    reference.forward(ids[:PROMPT], 0)
    with two_ranks(config, weights) as model:
        model.cache.fill_(float("nan"))  # positions that nobody has written must not be read
        model.cache[:, :, :, :PROMPT] = reference.cache[:, :, :, :PROMPT]
        yield model, reference, ids[PROMPT:]


def check_step(family: str) -> None:
    with injected(FAMILIES[family]) as (model, reference, ids):
        first = int(ids[0])
        second = model.greedy(first, PROMPT)
        third = model.greedy(second, PROMPT + 1)
        wanted = reference.forward(torch.tensor([first, second, third]), PROMPT)
        assert [second, third] == wanted[:2].argmax(-1).tolist()
        # All ranks' KV is there: what was given to them, and what their steps wrote.
        end = PROMPT + 2
        torch.testing.assert_close(model.cache[:, :, :, :end], reference.cache[:, :, :, :end], rtol=1e-5, atol=1e-5)
        # What is written over it reaches them before the next step.
        for cache in (model.cache, reference.cache):
            cache[:, :, :, :PROMPT] = cache[:, :, :, :PROMPT].flip(3)
        found, wanted = model.forward(ids[:3], PROMPT), reference.forward(ids[:3], PROMPT)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(model.hidden(3), reference.hidden(3), rtol=1e-4, atol=1e-4)
        assert model.bests(ids[:3].tolist(), PROMPT) == wanted.argmax(-1).tolist()


def check_widths() -> None:
    with injected(SMALL) as (model, _, ids):
        whole = model.forward(ids, PROMPT)
        for width in (1, 2, 3, 5):
            assert torch.equal(model.forward(ids[:width], PROMPT), whole[:width]), width


def check_best() -> None:
    config = replace(SMALL, vocab_size=11)  # of which the second rank has the ids from 6 on
    weights = random_weights(config)
    weights.head[4] = weights.head[7] = 50 * weights.head[1]
    weights.head[2] = weights.head[9] = -50 * weights.head[1]
    with two_ranks(config, weights) as model:
        assert model.greedy(3, 0) in (2, 4)
        assert model.greedy(3, 0) == int(model.forward(torch.tensor([3]), 0).argmax())
    weights.head[8, 0] = float("inf")
    with two_ranks(config, weights) as model:
        assert model.greedy(3, 0) is None


def check_death() -> None:
    with two_ranks(SMALL, random_weights(SMALL)) as model:
        greedy(model, 1)
        (other,) = children()
        os.kill(other, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(EngineError, match=rf"rank 1: its process \(pid {other}\) ended with exit code -9") as raised:
            greedy(model, CONTEXT)
        assert time.monotonic() - began < 10
        assert children() == []
        with pytest.raises(EngineError) as again:
            _ = model.cache
        assert again.value is raised.value


def check_words() -> None:
    with two_ranks(SMALL, random_weights(SMALL)) as model:
        model._leader._pipes[0].send_bytes(b"no message")
        with pytest.raises(EngineError, match=r"rank 1: error: unpack requires a buffer of 88 bytes"):
            greedy(model, CONTEXT)
        assert children() == []
    with two_ranks(SMALL, random_weights(SMALL)) as model:  # another one can take its place
        assert greedy(model, 1) is not None


def greedy(model: Any, steps: int) -> int | None:
    """Return the token after so many steps from the first position on."""
    token: int | None = 1
    for position in range(steps):
        token = model.greedy(token, position)
    return token


def hold_until_killed(pipe: Connection) -> None:
    with two_ranks(SMALL, random_weights(SMALL)):
        pipe.send(children())
        signal.pause()


def children() -> list[int]:
    """Return the processes that this one has started, but for multiprocessing's own."""
    return [child.pid for child in multiprocessing.active_children() if child.pid is not None]


def until_gone(pids: list[int]) -> None:
    there = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(there, timeout=10)
    assert alive == []
