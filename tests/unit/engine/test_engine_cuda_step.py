"""The GPU kernels against the PyTorch step: interpreted on the CPU, in float32; and on a GPU where there is one."""

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.cuda.buckets import buckets, padded
from decode_daemon.engine.model import LlamaModel
from decode_daemon.engine.weights import LayerWeights, Weights

pytest.importorskip("triton")

PLAIN = LlamaConfig(
    architecture="LlamaForCausalLM",
    layers=2,
    hidden=16,
    intermediate=24,
    heads=3,
    kv_heads=1,
    head_dim=16,
    vocab_size=37,
    max_positions=512,
    rms_eps=1e-5,
    rope_theta=1e4,
    rope_scaling=None,
    tied=False,
    qkv_bias=False,
    qk_norm=False,
)
FAMILIES = {
    "llama": PLAIN,
    "qwen2": replace(PLAIN, qkv_bias=True, heads=4, kv_heads=2),
    "qwen3": replace(PLAIN, qk_norm=True, tied=True, heads=2),
}
CONTEXT = 140
PROMPT = 126  # splits hold 128 positions, so that new rows fall on two of them


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The step module with kernels that Triton interprets, which it decides where a kernel is defined."""

    def forget() -> None:
        for name in [name for name in sys.modules if name.startswith("decode_daemon.engine.cuda")]:
            monkeypatch.delitem(sys.modules, name)

    forget()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    yield importlib.import_module("decode_daemon.engine.cuda.step")
    forget()


def random_weights(config: LlamaConfig) -> Weights:
    generator = torch.Generator().manual_seed(5)

    def tensor(*shape: int, mean: float = 0.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.3 + mean

    query_rows, qkv_rows = config.heads * config.head_dim, (config.heads + 2 * config.kv_heads) * config.head_dim
    layers = tuple(
        LayerWeights(
            input_norm=tensor(config.hidden, mean=1.0),
            qkv=tensor(qkv_rows, config.hidden),
            qkv_bias=tensor(qkv_rows) if config.qkv_bias else None,
            q_norm=tensor(config.head_dim, mean=1.0) if config.qk_norm else None,
            k_norm=tensor(config.head_dim, mean=1.0) if config.qk_norm else None,
            output=tensor(config.hidden, query_rows),
            post_norm=tensor(config.hidden, mean=1.0),
            gate_up=tensor(2 * config.intermediate, config.hidden),
            down=tensor(config.hidden, config.intermediate),
        )
        for _ in range(config.layers)
    )
    embedding = tensor(config.vocab_size, config.hidden)
    head = embedding if config.tied else tensor(config.vocab_size, config.hidden)
    return Weights(embedding, layers, tensor(config.hidden, mean=1.0), head)


# The interpreter computes padded rows of whatever their buffers hold, with NumPy, which warns.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("family", "width"), [("llama", 3), ("qwen2", 1), ("qwen3", 2)])
def test_a_step_is_the_pytorch_step(interpreted: ModuleType, family: str, width: int) -> None:
    config = FAMILIES[family]
    weights = random_weights(config)
    reference = LlamaModel(config, weights, CONTEXT)
    ids = torch.randint(0, config.vocab_size, (PROMPT + width,), generator=torch.Generator().manual_seed(1))
    reference.forward(ids[:PROMPT], 0)
    found = buckets(CONTEXT, config.kv_heads, config.head_dim)
    assert found[0].chunk == 128
    step = interpreted.Step(config, weights, CONTEXT, found[0].splits, overlap=False)
    step.cache.fill_(float("nan"))  # positions that nobody has written must not be read
    step.cache[:, :, :, :PROMPT] = reference.cache[:, :, :, :PROMPT]
    step.ids[:width] = ids[PROMPT:]
    step.state.copy_(torch.tensor((PROMPT, width)))
    step.launch(padded(width), found[0])

    wanted = reference.forward(ids[PROMPT:], PROMPT)
    torch.testing.assert_close(step.logits[:width], wanted, rtol=1e-4, atol=1e-4)
    end = PROMPT + width
    torch.testing.assert_close(step.cache[:, :, :, :end], reference.cache[:, :, :, :end], rtol=1e-5, atol=1e-5)
    assert step.cache[:, :, :, end:].isnan().all()
    assert step.best[:width].tolist() == wanted.argmax(-1).tolist()
    assert int(step.ids[0]) == int(wanted[-1].argmax())
    assert step.state.tolist() == [end, width]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_of_equal_logits_the_lowest_id_wins_and_one_that_is_not_finite_leaves_none(interpreted: ModuleType) -> None:
    config = replace(PLAIN, layers=1, intermediate=8, vocab_size=11)
    weights = random_weights(config)
    weights.head[4] = weights.head[7] = 50 * weights.head[1]
    weights.head[2] = weights.head[9] = -50 * weights.head[1]
    found = buckets(CONTEXT, config.kv_heads, config.head_dim)
    step = interpreted.Step(config, weights, CONTEXT, found[0].splits, overlap=False)
    step.state.copy_(torch.tensor((0, 1)))
    step.launch(1, found[0])
    assert int(step.best[0]) == int(step.logits[0].argmax())
    assert int(step.best[0]) in (2, 4)
    weights.head[5, 0] = float("inf")
    step.state.copy_(torch.tensor((0, 1)))
    step.launch(1, found[0])
    assert int(step.best[0]) == -1
    assert int(step.ids[0]) == 0


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs a GPU of capability 9.0"
)
def test_on_a_gpu_every_comparison_of_the_benchmark_holds() -> None:
    from benchmarks.gpu.checks import CASES, check

    failed = [str(one) for case, config in CASES.items() for one in check(case, config, torch.device("cuda")) if not one.met]
    assert failed == []
