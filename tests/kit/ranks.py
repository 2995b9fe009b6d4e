"""Engines of two ranks on the CPU: two processes, kernels interpreted, gloo between them.

As a program, `anchorleg` where the engine is such a one: `TRITON_INTERPRET=1 python -m tests.kit.ranks decode ...`.
"""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch

from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.cuda.plan import Plan
from decode_daemon.engine.cuda.shards import Shard
from decode_daemon.engine.cuda.tiles import Tile
from decode_daemon.engine.weights import Weights

RANKS = 2
INTERPRETED = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}


@contextmanager
def interpreting() -> Iterator[Executor]:
    """A process that is rank 0, in which Triton interprets kernels, as it does in the processes it starts."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in INTERPRETED.items():
                patch.setenv(name, value)
            process.submit(torch.set_num_threads, 1).result()
        yield process


@contextmanager
def two_ranks(config: LlamaConfig, weights: Weights, context_tokens: int) -> Iterator[Any]:
    """A `CudaModel`; after the block no process of its ranks is left."""
    with closing(model(config, weights, context_tokens)) as made:
        yield made
    assert children() == []


def model(config: LlamaConfig, weights: Weights, context_tokens: int) -> Any:
    """Return a `CudaModel`."""
    from decode_daemon.engine.cuda.model import CudaModel  # only where kernels are interpreted

    device, plan = torch.device("cpu"), Plan(tiles=tiles(config))
    return CudaModel(config, weights, context_tokens, device=device, overlap=False, plan=plan, ranks=RANKS)


def tiles(config: LlamaConfig) -> dict[tuple[int, int], Tile]:
    """Return tiles of so many rows that each product is a program or two: the interpreter takes its time for each."""
    tile = Tile(rows=16, columns=16, depth=1, warps=1)
    parts = [Shard(rank, RANKS, config).config for rank in range(RANKS)]
    shapes = [(part.hidden, (part.heads + 2 * part.kv_heads) * part.head_dim) for part in parts]
    shapes += [(part.heads * part.head_dim, part.hidden) for part in parts]
    shapes += [(part.hidden, 2 * part.intermediate) for part in parts]
    shapes += [(part.intermediate, part.hidden) for part in parts]
    shapes += [(part.hidden, part.vocab_size) for part in parts]
    return dict.fromkeys(shapes, tile)


def children() -> list[int]:
    """Return the processes that this one has started, but for multiprocessing's own."""
    return [child.pid for child in multiprocessing.active_children() if child.pid is not None]


def main() -> None:
    """Be `anchorleg`; where a GPU would compute, two ranks on the CPU do."""
    from cli.main import app
    from decode_daemon.engine import steps

    def cuda(config: LlamaConfig, weights: Weights, context_tokens: int, ranks: int, weights_as: str) -> Any:
        assert (ranks, weights_as) == (RANKS, "as-is")
        return model(config, weights, context_tokens)

    steps._cuda = cuda
    app()


if __name__ == "__main__":
    main()
