# mypy: disable-error-code="import-untyped"
"""fp8 weights of the CUDA step: how they are rounded, what is computed from them, and who refuses them."""

import re
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.cuda.buckets import buckets, padded, power_of_two
from decode_daemon.engine.cuda.quantized import LARGEST, Quantized, check_quantizable, quantized
from decode_daemon.engine.cuda.tiles import tile_for
from decode_daemon.engine.loop import LlamaEngine
from decode_daemon.engine.model import LlamaModel
from decode_daemon.engine.protocol import EngineError
from decode_daemon.engine.steps import choose_step
from tests.kit.products import is_the_product
from tests.unit.engine.test_engine_cuda_step import CONTEXT, PLAIN, PROMPT, interpreter, ptx, random_weights

triton = pytest.importorskip("triton")

__all__ = ["interpreter"]

CPU = torch.device("cpu")
SMALL = replace(PLAIN, layers=1, hidden=32, intermediate=48, heads=2)
Tiny = Callable[..., tuple[Path, Any]]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("inputs", [16, 48, 576, 1024])
def test_an_element_is_off_by_a_sixteenth_of_itself_or_by_half_a_step_of_the_smallest(inputs: int) -> None:
    matrix = (random(33, inputs) * torch.logspace(-30, 30, 33)[:, None]).bfloat16()
    matrix[:, 1::3] *= 1e-3
    before = matrix.clone()
    rounded = Quantized.of(matrix)
    error = (rounded.dequantized(torch.float64) - matrix.double()).abs()
    bound = torch.maximum(matrix.double().abs() * 2**-4, rounded.scale.double()[:, None] * 2**-10)
    assert (error <= bound * (1 + 1e-6)).all()
    assert torch.equal(matrix, before)


def test_the_largest_element_of_a_row_is_the_largest_value_and_a_row_of_zeros_has_scale_one() -> None:
    matrix = torch.stack([random(64), torch.zeros(64), random(64) * 1e-38])
    rounded = Quantized.of(matrix)
    torch.testing.assert_close(rounded.scale[0], matrix[0].abs().max() / LARGEST)
    assert rounded.values.float()[0].abs().max() == LARGEST
    assert rounded.scale[1] == 1
    assert rounded.dequantized()[1].eq(0).all()
    assert rounded.dequantized().isfinite().all()


def test_a_model_keeps_all_but_the_layers_matrices() -> None:
    weights = random_weights(replace(SMALL, tied=True, qkv_bias=True, qk_norm=True))
    kept = quantized(weights, CPU)
    assert kept.head is kept.embedding
    assert torch.equal(kept.embedding, weights.embedding)
    for layer, before in zip(kept.layers, weights.layers, strict=True):
        for name in ("input_norm", "post_norm", "qkv_bias", "q_norm", "k_norm"):
            assert torch.equal(getattr(layer, name), getattr(before, name))
        for name in ("qkv", "output", "gate_up", "down"):
            assert getattr(layer, name).values.dtype == torch.float8_e4m3fn
            assert getattr(layer, name).shape == getattr(before, name).shape


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_every_code_is_multiplied_exactly_and_with_its_own_input(interpreter: Executor, x_dtype: torch.dtype) -> None:
    interpreter.submit(check_codes, x_dtype).result()


@pytest.mark.parametrize(
    ("kind", "inputs"), [("plain", 80), ("normed", 576), ("gated", 48), ("residual", 80), ("bfloat16", 1024), ("normed", 1024)]
)
def test_a_product_is_that_of_float64_and_a_row_the_same_at_every_width(interpreter: Executor, kind: str, inputs: int) -> None:
    interpreter.submit(check_product, kind, inputs).result()


@pytest.mark.parametrize(("config", "width"), [(SMALL, 3), (replace(SMALL, qkv_bias=True, qk_norm=True, tied=True), 1)])
def test_a_step_is_the_pytorch_step_of_the_rounded_weights(interpreter: Executor, config: LlamaConfig, width: int) -> None:
    interpreter.submit(check_step, config, width).result()


@pytest.mark.parametrize(
    ("inputs", "outputs", "wishes"),
    [
        (4096, 6144, {"normed": True}),
        (4096, 14336, {"normed": True, "gated": True}),
        (14336, 4096, {"residual": True}),
        (1024, 512, {"normed": True}),
        (576, 960, {"normed": True}),
    ],
)
def test_products_compile_for_hopper_with_loads_of_16_bytes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, inputs: int, outputs: int, wishes: dict[str, bool]
) -> None:
    from decode_daemon.engine.cuda.products import SLOTS, product

    pointers = {"out": "bf16", "x": "bf16" if "residual" in wishes else "fp32", "weight": "fp8e4nv", "factors": "fp32"}
    pointers |= {"squares": "i64"} if "normed" in wishes else {}
    pointers |= {"addend": "bf16", "gain": "bf16", "scaled": "fp32", "next_squares": "i64"} if "residual" in wishes else {}
    absent = dict.fromkeys({"addend", "squares", "gain", "scaled", "next_squares", "peaks"} - pointers.keys())
    options = dict.fromkeys(("normed", "gated", "residual", "biased", "peaked"), False) | wishes
    shape = {"inputs": inputs, "outputs": outputs, "rows": 2, "columns": 2048, "depth": 1}
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    code = ptx(product, pointers, {"eps": "fp32"}, shape | options | absent | {"width": 2, "slots": SLOTS, "overlap": True})
    weights = re.findall(r"ld\.global\.L1::evict_first\.\S*?\.(v\d\.)?b(\d+)", code)
    assert weights
    assert set(weights) == {("v4.", "32")}
    assert "cvt.rn.f16x2.e4m3x2" in code  # two weights in one instruction


@pytest.mark.parametrize("inputs", [512, 576, 1536, 2048, 4096, 5120, 8192, 14336, 28672])
@pytest.mark.parametrize("outputs", [960, 4096, 28672])
def test_a_tile_holds_whole_blocks_of_the_order_that_weights_have(inputs: int, outputs: int) -> None:
    for gated in (False, True):
        tile = tile_for(inputs, outputs, gated=gated, element_bytes=1)
        assert tile.columns % min(512, inputs & -inputs) == 0
        assert tile.columns == 512 * tile.warps


@pytest.mark.parametrize("step", ["native", "torch"])
def test_steps_on_cpus_refuse_fp8_weights_by_name(step: Any) -> None:
    with pytest.raises(EngineError, match=f"fp8 weights need the CUDA step, and step is {step}: set step to cuda, or weights"):
        choose_step(SMALL, random_weights(SMALL), CONTEXT, step=step, weights_as="fp8")


def test_without_a_gpu_fp8_weights_are_refused_and_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EngineError, match="fp8 weights need the CUDA step, which is not possible here: PyTorch sees no CUDA"):
        choose_step(SMALL, random_weights(SMALL), CONTEXT, weights_as="fp8")


def test_what_cannot_be_quantized_is_named() -> None:
    check_quantizable(SMALL)
    with pytest.raises(EngineError, match="hidden_size is 40, and fp8 weights need a multiple of 16"):
        check_quantizable(replace(SMALL, hidden=40))
    with pytest.raises(EngineError, match="intermediate_size is 24, and fp8 weights need a multiple of 16"):
        check_quantizable(replace(SMALL, intermediate=24))
    with pytest.raises(EngineError, match="weights is fp8 and tensor_parallel is 2: set tensor_parallel to 1"):
        check_quantizable(SMALL, ranks=2)


def test_a_refusal_comes_before_the_weights_are_read(tiny: Tiny) -> None:
    folder, _ = tiny()
    for path in folder.glob("*.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(EngineError, match="fp8 weights need the CUDA step, and step is native"):
        LlamaEngine.load(folder, dtype=torch.bfloat16, context_tokens=64, threads=None, step="native", weights_as="fp8")


def launched(weight: Quantized, x: torch.Tensor, out: torch.Tensor, **wishes: Any) -> None:
    """Run `product` in one program, the quickest to interpret; what `wishes` do not name is absent."""
    from decode_daemon.engine.cuda.products import product

    inputs, outputs = x.shape[1], out.shape[1]
    columns = min(512, 4 * (inputs & -inputs))
    tensors = {name: wishes.pop(name, None) for name in ("addend", "squares", "gain", "scaled", "next_squares", "peaks")}
    flags = dict.fromkeys(("normed", "gated", "biased", "residual", "peaked", "overlap"), False) | wishes
    product[(1,)](
        *(out, x, weight.values, *tensors.values(), 1e-5),
        inputs=inputs,
        outputs=outputs,
        rows=power_of_two(outputs),
        columns=columns,
        depth=2,
        slots=1,
        factors=weight.scale,
        **flags,
    )


def check_codes(x_dtype: torch.dtype) -> None:
    numbers = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    wanted = numbers.view(torch.float8_e4m3fn).float()
    assert wanted.abs().max() == LARGEST
    inputs = 64
    for first in range(0, inputs, 8):
        matrix = torch.full((len(numbers), inputs), LARGEST)  # so that every scale is one
        matrix[:, first : first + 8] = wanted[:, None]
        weight = Quantized.of(matrix)
        assert weight.scale.eq(1).all()
        x = torch.eye(inputs)[first : first + 8].to(x_dtype)
        out = torch.zeros(8, len(numbers))
        launched(weight, x, out, width=8)
        assert torch.equal(out, wanted.expand(8, -1))


def check_product(kind: str, inputs: int) -> None:
    from decode_daemon.engine.cuda.products import SQUARE

    outputs, gated, normed = 10, kind == "gated", kind in ("normed", "gated")
    residual = kind in ("residual", "bfloat16")
    weight = Quantized.of(random(2 * outputs if gated else outputs, inputs) / 8)
    x, before, bias, gain = random(8, inputs), random(8, outputs), random(outputs), random(outputs)
    if kind == "bfloat16":
        x = x.bfloat16()  # as SiLU's results are
    square = random(8).abs() * inputs
    squares = (square.double() * SQUARE.value).long()
    rows = {}
    for width in (1, 2, 4, 8):
        out, scaled, next_squares = before.clone(), torch.zeros(8, outputs), torch.zeros(8, dtype=torch.int64)
        launched(
            *(weight, x, out),
            width=width,
            normed=normed,
            gated=gated,
            biased=not (residual or gated),
            residual=residual,
            addend=out if residual else bias,
            squares=squares,
            gain=gain,
            scaled=scaled,
            next_squares=next_squares,
        )
        rows[width] = out[:width], scaled[:width], next_squares[:width]
    is_the_product(
        *(rows, weight.dequantized(torch.float64), x, before if residual else bias),
        square=square if normed else None,
        gain=gain if residual else None,
        gated=gated,
    )


def check_step(config: LlamaConfig, width: int) -> None:
    from decode_daemon.engine.cuda.plan import Plan
    from decode_daemon.engine.cuda.step import Step
    from decode_daemon.engine.cuda.tiled import multiplier_for

    weights = quantized(random_weights(config), CPU)
    reference = LlamaModel(config, weights.dequantized(torch.float32), CONTEXT)
    ids = torch.randint(0, config.vocab_size, (PROMPT + width,), generator=torch.Generator().manual_seed(1))
    reference.forward(ids[:PROMPT], 0)
    found = buckets(CONTEXT, config.kv_heads, config.head_dim)
    multiplier = multiplier_for(config, CPU, quantized=True, overlap=False, plan=Plan())
    step = Step(config, weights, CONTEXT, found[0].splits, multiplier, overlap=False)
    step.cache[:, :, :, :PROMPT] = reference.cache[:, :, :, :PROMPT]
    step.ids[:width] = ids[PROMPT:]
    step.state.copy_(torch.tensor((PROMPT, width)))
    step.launch(padded(width), found[0])
    wanted = reference.forward(ids[PROMPT:], PROMPT)
    torch.testing.assert_close(step.logits[:width], wanted, rtol=1e-4, atol=1e-4)
    assert step.best[:width].tolist() == wanted.argmax(-1).tolist()
