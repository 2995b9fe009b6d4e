"""The native step computes what the PyTorch step computes, row for row the same whatever its width and threads."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.cpu.build import library
from decode_daemon.engine.cpu.native import INSTRUCTIONS, MAX_WIDTH, Library, NativeModel, unsupported
from decode_daemon.engine.model import LlamaModel
from decode_daemon.engine.protocol import EngineError
from decode_daemon.engine.weights import load_weights
from tests.kit.families import FAMILIES, PROMPT

Tiny = Callable[..., tuple[Path, Any]]

SHAPES = {
    **FAMILIES,
    "one kv head": ("Llama", {"num_key_value_heads": 1}),
    # Rows longer than a block, more rows than a block may have, and a last block whose quarters end at different rows.
    "wide": ("Llama", {"intermediate_size": 12_304, "vocab_size": 103}),
    "head_dim 64": ("Llama", {"head_dim": 64}),
    "head_dim 80": ("Llama", {"head_dim": 80}),
    "head_dim 96": ("Llama", {"head_dim": 96}),
    "head_dim 128": ("Llama", {"head_dim": 128}),
}
families = pytest.mark.parametrize(("family", "changes"), SHAPES.values(), ids=SHAPES.keys())
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])


@pytest.fixture(scope="session")
def native_library(native_cache: Path) -> Library:
    return Library(library(native_cache))


@pytest.fixture(params=INSTRUCTIONS)
def native(request: pytest.FixtureRequest, native_library: Library) -> Callable[..., NativeModel]:
    """Make a native model of a folder, for each set of instructions that this CPU has."""
    if not native_library.supports(request.param.encode()):
        pytest.skip(f"this CPU has no {request.param}")

    def make(folder: Path, dtype: torch.dtype, context_tokens: int = 64, threads: int = 2, pin: bool = True) -> NativeModel:
        config = LlamaConfig.read(folder)
        weights = load_weights(folder, config, dtype)
        return NativeModel(
            config,
            weights,
            context_tokens,
            library=native_library,
            instructions=request.param,
            threads=threads,
            pin=pin,
        )

    return make


Native = Callable[..., NativeModel]


def torch_model(folder: Path, dtype: torch.dtype, context_tokens: int = 64) -> LlamaModel:
    config = LlamaConfig.read(folder)
    return LlamaModel(config, load_weights(folder, config, dtype), context_tokens)


def one_by_one(model: LlamaModel | NativeModel, ids: list[int], start: int = 0) -> torch.Tensor:
    with torch.inference_mode():
        return torch.cat([model.forward(torch.tensor([token]), start + at) for at, token in enumerate(ids)])


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


def filled(model: LlamaModel | NativeModel, seed: int = 1) -> None:
    model.cache.copy_(torch.randn(model.cache.shape, generator=torch.Generator().manual_seed(seed)))


@families
def test_logits_and_cache_equal_those_of_the_pytorch_step_in_float32(
    tiny: Tiny, native: Native, family: str, changes: dict[str, Any]
) -> None:
    folder, _ = tiny(family, **changes)
    ours, theirs = native(folder, torch.float32), torch_model(folder, torch.float32)
    torch.testing.assert_close(one_by_one(ours, PROMPT), one_by_one(theirs, PROMPT), rtol=1e-4, atol=2e-4)
    torch.testing.assert_close(ours.cache, theirs.cache, rtol=1e-4, atol=1e-4)


@families
def test_bfloat16_is_as_near_to_float32_as_the_pytorch_step_is(
    tiny: Tiny, native: Native, family: str, changes: dict[str, Any]
) -> None:
    folder, _ = tiny(family, **changes)
    exact = one_by_one(torch_model(folder, torch.float32), PROMPT)
    theirs = error(one_by_one(torch_model(folder, torch.bfloat16), PROMPT), exact)
    assert error(one_by_one(native(folder, torch.bfloat16), PROMPT), exact) < 1.5 * theirs


@dtypes
@pytest.mark.parametrize("position", [0, 58, 8188], ids=["start", "across a chunk", "across a longer chunk"])
def test_a_row_is_the_same_bit_for_bit_in_every_width_and_with_any_threads(
    tiny: Tiny, native: Native, dtype: torch.dtype, position: int
) -> None:
    folder, _ = tiny("Qwen3", head_dim=80, max_position_embeddings=16384, vocab_size=103, intermediate_size=2064)
    single = native(folder, dtype, 8400, threads=1)
    filled(single)
    before = single.cache.clone()
    ids = PROMPT[:MAX_WIDTH]
    wanted = one_by_one(single, ids, position)
    for threads in (1, 2, 3, 9):
        wide = native(folder, dtype, 8400, threads=threads)
        for width in range(1, MAX_WIDTH + 1) if threads == 2 else (MAX_WIDTH,):
            wide.cache.copy_(before)
            assert torch.equal(wide.forward(torch.tensor(ids[:width]), position), wanted[:width])
        assert torch.equal(wide.cache, single.cache)


@dtypes
def test_a_long_context_gives_what_the_pytorch_step_gives(tiny: Tiny, native: Native, dtype: torch.dtype) -> None:
    folder, _ = tiny(max_position_embeddings=40_000)
    ours, theirs = native(folder, dtype, 40_000), torch_model(folder, dtype, 40_000)
    filled(ours)
    theirs.cache.copy_(ours.cache)
    for position in (4096, 8191, 8192, 20_000, 39_990):
        limit = 2e-5 if dtype == torch.float32 else 0.03
        assert error(one_by_one(ours, PROMPT[:3], position), one_by_one(theirs, PROMPT[:3], position)) < limit


@dtypes
def test_a_step_reads_no_position_beyond_its_own(tiny: Tiny, native: Native, dtype: torch.dtype) -> None:
    folder, _ = tiny()
    clean, dirty = native(folder, dtype), native(folder, dtype)
    dirty.cache.fill_(torch.nan)
    assert torch.equal(one_by_one(dirty, PROMPT), one_by_one(clean, PROMPT))


def test_every_greedy_token_is_the_pytorch_steps_choice_or_ties_with_it(tiny: Tiny, native: Native) -> None:
    folder, _ = tiny(max_position_embeddings=512)
    for first in (5, 41, 90):
        ours, theirs = native(folder, torch.bfloat16, 256, threads=1), torch_model(folder, torch.bfloat16, 256)
        token = first
        for position in range(220):
            with torch.inference_mode():
                logits = theirs.forward(torch.tensor([token]), position)[0].float()
            chosen = ours.greedy(token, position)
            assert chosen is not None
            # Logits reach about 20 here: their own spacing is 1/8, and each step's error is a few of those.
            assert logits.max() - logits[chosen] <= 0.75
            token = chosen


def test_greedy_takes_the_lowest_of_equal_logits_as_argmax_does(tiny: Tiny, native: Native) -> None:
    folder, _ = tiny()
    model = native(folder, torch.float32)
    plain = model.greedy(5, 0)
    assert plain is not None
    head = model._kept[0].head
    for apart in (*range(-12, 0), *range(1, 13), 40):
        twin = (plain + apart) % 97
        before = head[twin].clone()
        head[twin] = head[plain]
        assert model.greedy(5, 0) == min(plain, twin) == int(model.forward(torch.tensor([5]), 0)[0].argmax())
        head[twin] = before


@dtypes
def test_logits_that_are_not_finite_have_no_greedy_token(tiny: Tiny, native: Native, dtype: torch.dtype) -> None:
    folder, _ = tiny()
    model = native(folder, dtype)
    for damage in (torch.nan, torch.inf):
        model.cache.fill_(damage)
        assert model.greedy(5, 20) is None


@pytest.mark.parametrize(
    ("ids", "position", "message"),
    [([1, 2], 63, "context of 64 tokens"), ([97], 0, "outside the vocabulary"), ([-1], 0, "outside the vocabulary")],
)
def test_what_lies_outside_the_model_is_refused(
    tiny: Tiny, native: Native, ids: list[int], position: int, message: str
) -> None:
    folder, _ = tiny()
    with pytest.raises(EngineError, match=message):
        native(folder, torch.float32).forward(torch.tensor(ids), position)


def test_a_shape_that_the_vectors_do_not_fit_is_named(tiny: Tiny) -> None:
    folder, _ = tiny(intermediate_size=72)
    reason = unsupported(LlamaConfig.read(folder))
    assert reason is not None
    assert "intermediate is 72" in reason


def step_threads() -> dict[str, set[int]]:
    """The cores of each of the step's own threads, by thread id; only of those that are asleep."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        name, _, rest = (task / "stat").read_text().rpartition(")")
        if "anchorleg-step" in name:
            state = rest.split()[0]
            found[task.name] = os.sched_getaffinity(int(task.name)) if state == "S" else set()
    return found


def test_threads_stay_on_their_cores_sleep_between_steps_and_end_with_the_model(tiny: Tiny, native: Native) -> None:
    folder, _ = tiny()
    cores = os.sched_getaffinity(0)
    before = step_threads()
    model = native(folder, torch.float32, threads=len(cores))
    model.greedy(5, 0)
    assert os.sched_getaffinity(0) == cores
    paused = threading.Event()
    for _ in range(200):  # they look for the next step for microseconds first
        own = {task: where for task, where in step_threads().items() if task not in before}
        if len(own) == len(cores) - 1 and all(len(where) == 1 for where in own.values()):
            break
        paused.wait(0.01)
    assert len(set().union(*own.values())) == len(own) == len(cores) - 1
    del model
    assert step_threads().keys() <= before.keys()
