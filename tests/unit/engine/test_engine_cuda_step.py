# mypy: disable-error-code="import-untyped"
"""The GPU kernels against the PyTorch step: interpreted on the CPU, in float32; and on a GPU where there is one."""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.cuda.buckets import buckets, padded
from decode_daemon.engine.model import LlamaModel
from decode_daemon.engine.weights import LayerWeights, Weights
from tests.kit.products import is_the_product

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


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Executor]:
    """A process in which Triton interprets kernels; it decides that where it is imported."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        with pytest.MonkeyPatch.context() as patch:  # for that process only: kernels are compiled here
            patch.setenv("TRITON_INTERPRET", "1")
            process.submit(torch.set_num_threads, 2).result()
        yield process


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


@pytest.mark.parametrize(
    ("family", "width"),
    [("llama", 3), ("qwen2", 1), ("qwen3", 2)],
)
def test_a_step_is_the_pytorch_step(interpreter: Executor, family: str, width: int) -> None:
    interpreter.submit(check_step, family, width).result()


@pytest.mark.parametrize("kind", ["plain", "normed", "gated", "residual"])
def test_a_product_is_that_of_float64_and_a_row_the_same_at_every_width(interpreter: Executor, kind: str) -> None:
    interpreter.submit(check_product, kind).result()


def test_of_equal_logits_the_lowest_id_wins_and_one_that_is_not_finite_leaves_none(interpreter: Executor) -> None:
    interpreter.submit(check_best).result()


@pytest.mark.parametrize("inputs", [1024, 576])
def test_products_compile_for_hopper_with_loads_of_16_bytes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, inputs: int
) -> None:
    from decode_daemon.engine.cuda.products import SLOTS, product

    pointers = {"out": "bf16", "x": "fp32", "weight": "bf16", "squares": "i64"}
    tile = {"rows": 2, "columns": 512, "depth": 2, "width": 2, "slots": SLOTS}
    wishes = {"normed": True, "gated": True, "residual": False, "biased": False, "peaked": False, "overlap": True}
    absent = dict.fromkeys(("addend", "gain", "scaled", "next_squares", "peaks"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {"inputs": inputs, "outputs": 512} | tile | wishes | absent
    code = ptx(product, pointers, {"eps": "fp32"}, constants)
    assert "griddepcontrol.wait" in code
    assert ".v4.b32" in code
    assert "ld.global.b16" not in code


@pytest.mark.parametrize("normed", [False, True])
def test_attention_compiles_for_hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, normed: bool) -> None:
    from decode_daemon.engine.cuda.attention import attend

    names = ("qkv", "cache", "cos", "sin", *(("q_gain", "k_gain") if normed else ()))
    pointers = dict.fromkeys(("partial", "peaks", "masses"), "fp32") | dict.fromkeys(names, "bf16") | {"state": "i32"}
    scalars = {"scale": "fp32", "eps": "fp32", "context": "i32", "splits": "i32", "chunk": "i32"}
    shape = {"heads": 4, "kv_heads": 2, "dim": 64, "rows": 16, "tile": 32, "stages": 2, "normed": normed, "overlap": True}
    absent = {} if normed else dict.fromkeys(("q_gain", "k_gain"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    code = ptx(attend, pointers, scalars, shape | absent)
    assert "mma.sync" in code  # the products of attention are tensor cores'
    assert "cp.async" in code  # and its tiles are under way while another is computed


def ptx(kernel: Any, pointers: dict[str, str], scalars: dict[str, str], constants: dict[str, Any]) -> str:
    """Compile for capability 9.0, which needs no GPU; pointers are aligned as PyTorch's are."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    kinds = {name: f"*{kind}" for name, kind in pointers.items()} | scalars
    source = ASTSource(
        kernel,
        {name: kinds.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in pointers},
    )
    options = {"num_warps": 4, "enable_fp_fusion": True, "launch_pdl": True}
    return str(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


def check_product(kind: str) -> None:
    from decode_daemon.engine.cuda.products import SQUARE, product

    inputs, outputs, gated = 72, 10, kind == "gated"
    normed, residual = kind in ("normed", "gated"), kind == "residual"
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    weight = random(2 * outputs if gated else outputs, inputs).bfloat16()
    x, before, bias, gain = random(8, inputs), random(8, outputs), random(outputs), random(outputs)
    if not normed:
        x = x.bfloat16()  # as attention's and SiLU's results are
    square = torch.rand(8, generator=generator) * inputs
    squares = (square.double() * SQUARE.value).long()
    rows = {}
    for width in (1, 2, 4, 8):
        out, scaled = before.clone(), torch.zeros(8, outputs)
        next_squares = torch.zeros(8, dtype=torch.int64)
        product[(-(-outputs // 4),)](
            *(out, x, weight, out if residual else bias, squares, gain, scaled, next_squares, None, 1e-5),
            inputs=inputs,
            outputs=outputs,
            width=width,
            rows=4,
            columns=16,
            depth=2,
            normed=normed,
            gated=gated,
            biased=not (residual or gated),
            residual=residual,
            peaked=False,
            slots=1,
            overlap=False,
        )
        rows[width] = out[:width], scaled[:width], next_squares[:width]
    is_the_product(
        *(rows, weight.double(), x, before if residual else bias),
        square=square if normed else None,
        gain=gain if residual else None,
        gated=gated,
    )


def check_step(family: str, width: int) -> None:
    from decode_daemon.engine.cuda.plan import Plan
    from decode_daemon.engine.cuda.step import Step
    from decode_daemon.engine.cuda.tiled import multiplier_for

    config = FAMILIES[family]
    weights = random_weights(config)
    reference = LlamaModel(config, weights, CONTEXT)
    ids = torch.randint(0, config.vocab_size, (PROMPT + width,), generator=torch.Generator().manual_seed(1))
    reference.forward(ids[:PROMPT], 0)
    found = buckets(CONTEXT, config.kv_heads, config.head_dim)
    assert found[0].chunk == 128
    multiplier = multiplier_for(config, torch.device("cpu"), quantized=False, overlap=False, plan=Plan())
    step = Step(config, weights, CONTEXT, found[0].splits, multiplier, overlap=False)
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


def check_best() -> None:
    from decode_daemon.engine.cuda.plan import Plan
    from decode_daemon.engine.cuda.step import Step
    from decode_daemon.engine.cuda.tiled import multiplier_for

    config = replace(PLAIN, layers=1, intermediate=8, vocab_size=11)
    weights = random_weights(config)
    weights.head[4] = weights.head[7] = 50 * weights.head[1]
    weights.head[2] = weights.head[9] = -50 * weights.head[1]
    found = buckets(CONTEXT, config.kv_heads, config.head_dim)
    multiplier = multiplier_for(config, torch.device("cpu"), quantized=False, overlap=False, plan=Plan())
    step = Step(config, weights, CONTEXT, found[0].splits, multiplier, overlap=False)
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
