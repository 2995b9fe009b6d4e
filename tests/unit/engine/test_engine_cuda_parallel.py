"""A step that two ranks compute together: two processes on the CPU, kernels interpreted, gloo between them."""

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.model import LlamaModel
from tests.kit.ranks import interpreting, two_ranks
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
    with interpreting() as process:
        yield process


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_compute_what_one_does(interpreter: Executor, family: str) -> None:
    interpreter.submit(check_step, family).result(_BOUND_S)


def test_a_row_is_the_same_at_every_width(interpreter: Executor) -> None:
    interpreter.submit(check_widths).result(_BOUND_S)


def test_of_equal_logits_the_lowest_id_wins_and_one_that_is_not_finite_leaves_none(interpreter: Executor) -> None:
    interpreter.submit(check_best).result(_BOUND_S)


@contextmanager
def injected(config: LlamaConfig) -> Iterator[tuple[Any, LlamaModel, torch.Tensor]]:
    """Return two ranks and the PyTorch model, both with the KV of PROMPT positions, and ids to go on with."""
    weights = random_weights(config)
    reference = LlamaModel(config, weights, CONTEXT)
    ids = torch.randint(0, config.vocab_size, (PROMPT + 8,), generator=torch.Generator().manual_seed(1))
    reference.forward(ids[:PROMPT], 0)
    with two_ranks(config, weights, CONTEXT) as model:
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
    with two_ranks(config, weights, CONTEXT) as model:
        assert model.greedy(3, 0) in (2, 4)
        assert model.greedy(3, 0) == int(model.forward(torch.tensor([3]), 0).argmax())
    weights.head[8, 0] = float("inf")
    with two_ranks(config, weights, CONTEXT) as model:
        assert model.greedy(3, 0) is None
