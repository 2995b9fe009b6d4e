# mypy: disable-error-code="import-untyped"
"""The gathering kernel, interpreted on the CPU, gives the bits of the strided copies; and it compiles for Hopper."""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from handoff.layout import Digit, GqaBlock, KindLayout, KVLayout, Layer, contiguous_block
from tests.kit.layouts import gqa

pytest.importorskip("triton")

SIZES = {"kv_heads": 2, "head_dim": 24, "block_tokens": 8}  # dims of no power of two
NHD = contiguous_block(**SIZES, dtype="bfloat16", order=("kind", "token", "head", "dim"))
HND = contiguous_block(**SIZES, dtype="bfloat16", order=("head", "token", "kind", "dim"))
# As CPU kernels with matrix tiles pack them: keys in pairs of dims, values in pairs of tokens.
TILES = GqaBlock(
    **SIZES,
    dtype="bfloat16",
    keys=KindLayout(0, head=(Digit(2, 384),), token=(Digit(2, 96), Digit(4, 2)), dim=(Digit(12, 8), Digit(2, 1))),
    values=KindLayout(192, head=(Digit(2, 384),), token=(Digit(4, 48), Digit(2, 1)), dim=(Digit(24, 2),)),
)
LAYOUTS = {
    "one order": KVLayout((Layer("a", 0), Layer("b", 0)), (NHD,)),
    "three orders": KVLayout((Layer("a", 0), Layer("b", 1), Layer("c", 1), Layer("d", 2), Layer("e", 0)), (NHD, HND, TILES)),
}


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Executor]:
    """A process in which Triton interprets kernels; it decides that where it is imported."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            process.submit(torch.set_num_threads, 2).result()
        yield process


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("shards", "tokens"), [(1, 1), (1, 8), (2, 43)])
def test_the_kernel_gives_the_bits_of_the_strided_copies(interpreter: Executor, name: str, shards: int, tokens: int) -> None:
    LAYOUTS[name].validate()
    interpreter.submit(check, LAYOUTS[name], shards, tokens).result()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_the_kernel_scales_fp8_as_the_strided_copies_do(interpreter: Executor, dtype: str) -> None:
    layout = quantized(LAYOUTS["three orders"], dtype)
    layout.validate()
    interpreter.submit(check, layout, 2, 13).result()


def quantized(layout: KVLayout, dtype: str) -> KVLayout:
    """The same orders in fp8, each layer with scales of its own."""
    layers = (Layer(layer.name, layer.block, 0.3 + index, 0.7 / (1 + index)) for index, layer in enumerate(layout.layers))
    return KVLayout(tuple(layers), tuple(msgspec.structs.replace(block, dtype=dtype) for block in layout.blocks))


def check(layout: KVLayout, shards: int, tokens: int) -> None:
    from decode_daemon.convert import convert, runs
    from decode_daemon.convert_cuda import gather

    block = gqa(layout, 0)
    generator = torch.Generator().manual_seed(2)
    landed = torch.randint(0, 256, (shards * layout.bytes_for(tokens),), dtype=torch.uint8, generator=generator)
    target = torch.bfloat16
    if block.dtype != "bfloat16":
        # The interpreter knows no fp8 that is not finite, and rounds to bfloat16 towards zero.
        landed &= 0xBF
        target = torch.float32
    shape = (len(layout.layers), 2, shards * block.kv_heads, tokens + 5, block.head_dim)
    cache, other = (torch.full(shape, 9.0, dtype=target) for _ in range(2))
    convert(landed, layout, other[:, 0, :, :tokens], other[:, 1, :, :tokens], shards=shards)
    for run in runs(landed, layout, cache[:, 0, :, :tokens], cache[:, 1, :, :tokens], shards):
        gather(run)
    assert torch.equal(cache.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("stored", ["bf16", "fp8e4nv", "fp8e5"])
def test_the_kernel_compiles_for_hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stored: str) -> None:
    from decode_daemon.convert_cuda import copy_heads

    scaled = stored != "bf16"
    kinds: dict[str, str] = {"out": "*bf16", "landed": f"*{stored}", "places": "*i32"}
    kinds |= dict.fromkeys(("offset", "tokens", "block_tokens", "block_elements", "layer_elements"), "i32")
    kinds |= dict.fromkeys(("out_layer", "out_head", "out_token"), "i32")
    kinds |= {"scales": "*fp32"} if scaled else {}
    constants: dict[str, Any] = {"dims": 128, "columns": 128, "tile": 32, "scaled": scaled}
    constants |= {} if scaled else {"scales": None}
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    code = ptx(copy_heads, kinds, constants)
    assert "st.global" in code
    assert ("cvt.rn.bf16" in code) is scaled  # to the nearest, as PyTorch rounds; what is not scaled is not rounded


def ptx(kernel: Any, kinds: dict[str, str], constants: dict[str, Any]) -> str:
    """Compile for capability 9.0, which needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {name: kinds.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
    )
    options = {"num_warps": 4, "enable_fp_fusion": True}
    return str(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("pinned", [False, True])
def test_on_a_gpu_conversion_gives_the_bits_of_the_strided_copies(pinned: bool) -> None:
    from decode_daemon.convert import convert

    layout, tokens = LAYOUTS["three orders"], 43
    landed = torch.randint(0, 256, (2 * layout.bytes_for(tokens),), dtype=torch.uint8)
    shape = (len(layout.layers), 2, 2 * gqa(layout, 0).kv_heads, tokens, gqa(layout, 0).head_dim)
    expected, found = torch.zeros(shape, dtype=torch.bfloat16), torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    convert(landed, layout, expected[:, 0], expected[:, 1], shards=2)
    convert(landed.pin_memory() if pinned else landed, layout, found[:, 0], found[:, 1], shards=2)
    assert torch.equal(found.cpu().view(torch.int16), expected.view(torch.int16))
