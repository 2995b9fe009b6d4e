"""What the CUDA model queues, without a GPU: its graphs are replaced by a function that stands for the model."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
import torch

from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.cpu.build import BuildError
from decode_daemon.engine.cuda import model as cuda
from decode_daemon.engine.cuda.buckets import Bucket
from decode_daemon.engine.cuda.model import CudaModel, on_device, unsupported
from decode_daemon.engine.model import LlamaModel
from decode_daemon.engine.protocol import EngineError
from decode_daemon.engine.steps import choose_step
from decode_daemon.engine.weights import LayerWeights, Weights

pytest.importorskip("triton")

VOCAB = 101
CONTEXT = 2100
CPU = torch.device("cpu")
CONFIG = LlamaConfig(
    architecture="LlamaForCausalLM",
    layers=1,
    hidden=16,
    intermediate=16,
    heads=2,
    kv_heads=1,
    head_dim=32,
    vocab_size=VOCAB,
    max_positions=4096,
    rms_eps=1e-5,
    rope_theta=1e4,
    rope_scaling=None,
    tied=True,
    qkv_bias=False,
    qk_norm=False,
)


def weights(tied: bool = True) -> Weights:
    layer = LayerWeights(
        input_norm=torch.ones(16),
        qkv=torch.rand(128, 16),
        qkv_bias=None,
        q_norm=None,
        k_norm=None,
        output=torch.rand(16, 64),
        post_norm=torch.ones(16),
        gate_up=torch.rand(32, 16),
        down=torch.rand(16, 16),
    )
    embedding = torch.rand(VOCAB, 16)
    return Weights(embedding, (layer,), torch.ones(16), embedding if tied else torch.rand(VOCAB, 16))


def follows(token: int, position: int) -> int:
    return (7 * token + position) % VOCAB


class FakeStep:
    """Buffers as the real step has them; a launch answers with `follows`, and notes (tokens, position, width, bucket)."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.ids = torch.zeros(8, dtype=torch.int64)
        self.state = torch.zeros(2, dtype=torch.int32)
        self.best = torch.zeros(8, dtype=torch.int64)
        self.logits = torch.zeros(8, VOCAB)
        self.cache = torch.zeros(1)
        self.multiplier = SimpleNamespace(name="ring")
        self.launched: list[tuple[list[int], int, int, int]] = []
        self.broken = False

    def launch(self, width: int, bucket: Bucket) -> None:
        position, rows = self.state.tolist()
        tokens = self.ids[:rows].tolist()
        self.launched.append((tokens, position, width, bucket.tokens))
        self.logits.zero_()
        for row, token in enumerate(tokens):
            self.best[row] = follows(token, position + row)
            self.logits[row, self.best[row]] = 1.0
        if self.broken:
            self.best.fill_(-1)
        self.ids[0] = self.best[rows - 1].clamp(min=0)
        self.state[0] += rows


class FakeGraph:
    def __init__(self, step: FakeStep, width: int, bucket: Bucket) -> None:
        self.step, self.width, self.bucket = step, width, bucket

    def replay(self) -> None:
        self.step.launch(self.width, self.bucket)


class FakeEvent:
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> tuple[CudaModel, FakeStep]:
    step = FakeStep()
    monkeypatch.setattr(cuda, "Step", lambda *_, **__: step)
    monkeypatch.setattr(cuda, "_results", lambda: (torch.zeros(4, dtype=torch.int64), [FakeEvent() for _ in range(4)]))
    monkeypatch.setattr(CudaModel, "_captured", lambda _, width, bucket: FakeGraph(step, width, bucket))
    return CudaModel(CONFIG, weights(), CONTEXT, device=CPU), step


def test_greedy_steps_follow_each_other_with_one_always_queued_ahead(model: tuple[CudaModel, FakeStep]) -> None:
    cuda_model, step = model
    token = wanted = 5
    for position in range(30, 50):
        token, wanted = cuda_model.greedy(token, position) or 0, follows(wanted, position)
        assert token == wanted
        assert len(step.launched) == position - 30 + 2  # never a step again, and always one more than was asked for


def test_a_step_ahead_crosses_into_the_next_bucket(model: tuple[CudaModel, FakeStep]) -> None:
    cuda_model, step = model
    cuda_model.greedy(1, 1023)
    assert [(position, bucket) for _, position, _, bucket in step.launched] == [(1023, 1024), (1024, 2048)]


def test_nothing_is_queued_beyond_the_context(model: tuple[CudaModel, FakeStep]) -> None:
    cuda_model, step = model
    assert cuda_model.greedy(3, CONTEXT - 1) == follows(3, CONTEXT - 1)
    assert len(step.launched) == 1
    with pytest.raises(EngineError, match="do not fit a context"):
        cuda_model.greedy(3, CONTEXT)


@pytest.mark.parametrize("asked", [(9, 31), (None, 32), (None, 30)])
def test_another_step_than_the_one_ahead_is_computed_anew(
    model: tuple[CudaModel, FakeStep], asked: tuple[int | None, int]
) -> None:
    cuda_model, step = model
    best = cuda_model.greedy(5, 30) or 0
    token, position = asked[0] if asked[0] is not None else best, asked[1]
    assert cuda_model.greedy(token, position) == follows(token, position)
    assert step.launched[2][:2] == ([token], position)


def test_a_step_ahead_does_not_count_once_the_cache_was_handed_out(model: tuple[CudaModel, FakeStep]) -> None:
    """Another prompt of the same length may go on with the very id that was the last answer's next."""
    cuda_model, step = model
    best = cuda_model.greedy(5, 30) or 0
    _ = cuda_model.cache
    assert cuda_model.greedy(best, 31) == follows(best, 31)
    assert step.launched[2][:2] == ([best], 31)


def test_logits_that_are_not_finite_have_no_best_id_and_no_step_after(model: tuple[CudaModel, FakeStep]) -> None:
    cuda_model, step = model
    step.broken = True
    assert cuda_model.greedy(5, 30) is None
    step.broken = False
    assert cuda_model.greedy(0, 31) == follows(0, 31)
    assert step.launched[2][:2] == ([0], 31)


def test_rows_are_computed_eight_at_a_time_and_never_across_buckets(model: tuple[CudaModel, FakeStep]) -> None:
    cuda_model, step = model
    ids = torch.arange(20) % VOCAB
    logits = cuda_model.forward(ids, 1015)
    assert [(len(tokens), position, width, bucket) for tokens, position, width, bucket in step.launched] == [
        (8, 1015, 8, 1024),
        (1, 1023, 1, 1024),
        (8, 1024, 8, 2048),
        (3, 1032, 4, 2048),
    ]
    assert logits.argmax(-1).tolist() == [follows(int(token), 1015 + row) for row, token in enumerate(ids)]


def test_tokens_outside_the_vocabulary_are_refused(model: tuple[CudaModel, FakeStep]) -> None:
    with pytest.raises(EngineError, match=f"token {VOCAB} is outside"):
        model[0].greedy(VOCAB, 3)
    with pytest.raises(EngineError, match="token -1 is outside"):
        model[0].forward(torch.tensor([1, -1]), 3)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_keep_their_values_and_a_tied_head_its_one_tensor(tied: bool) -> None:
    source = weights(tied)
    moved = on_device(source, CPU, torch.bfloat16)
    assert (moved.head is moved.embedding) == tied
    assert moved.layers[0].qkv_bias is None
    for name in ("qkv", "gate_up", "down", "output", "input_norm"):
        torch.testing.assert_close(getattr(moved.layers[0], name), getattr(source.layers[0], name).bfloat16(), rtol=0, atol=0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A Hopper GPU as far as questions about it go."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _=None: "a GPU")
    return monkeypatch


@pytest.mark.usefixtures("gpu")
def test_what_the_cuda_step_cannot_compute_is_named() -> None:
    assert unsupported(CONFIG, torch.bfloat16, CPU) is None
    assert "bfloat16, not in float32" in str(unsupported(CONFIG, torch.float32, CPU))
    assert "head_dim is 48" in str(unsupported(replace(CONFIG, head_dim=48), torch.bfloat16, CPU))


def test_an_older_gpu_is_named_and_the_step_that_serves_says_why(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.cuda, "get_device_capability", lambda _=None: (8, 6))

    def no_library(_: object) -> None:
        raise BuildError("no compiler here")

    gpu.setattr("decode_daemon.engine.steps.library", no_library)
    with structlog.testing.capture_logs() as lines:
        chosen = choose_step(CONFIG, weights(), 64)
    assert isinstance(chosen, LlamaModel)
    assert "a GPU has compute capability 8.6, the CUDA step needs 9.0" in lines[0]["why"]
    assert len(lines) == 1
    with pytest.raises(EngineError, match=r"CUDA step is not possible here: a GPU has compute capability 8\.6"):
        choose_step(CONFIG, weights(), 64, step="cuda")


def test_a_gpu_is_chosen_where_there_is_one(gpu: pytest.MonkeyPatch, model: tuple[CudaModel, FakeStep]) -> None:
    gpu.setattr(cuda, "CudaModel", lambda *_, **__: model[0])
    whole = on_device(weights(), CPU, torch.bfloat16)
    with structlog.testing.capture_logs() as lines:
        assert choose_step(CONFIG, whole, CONTEXT) is model[0]
    assert [(line["step"], line["device"]) for line in lines] == [("cuda", "a GPU")]


def test_a_gpu_whose_kernels_cannot_be_launched_is_a_reason(gpu: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    gpu.setattr(cuda, "CudaModel", broken)
    with pytest.raises(EngineError, match="CUDA step is not possible here: Failed to find C compiler"):
        choose_step(CONFIG, on_device(weights(), CPU, torch.bfloat16), CONTEXT, step="cuda")


def test_without_a_gpu_the_cuda_step_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EngineError, match="CUDA step is not possible here: PyTorch sees no CUDA device"):
        choose_step(CONFIG, weights(), 64, step="cuda")
