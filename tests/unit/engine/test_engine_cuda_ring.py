# mypy: disable-error-code="import-untyped"
"""How matrices lie for the ring, who takes which cut, and that its kernels compile as Python takes them to be."""

import ctypes
from concurrent.futures import Executor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from decode_daemon.engine.cuda import ring
from decode_daemon.engine.cuda.model import on_device
from decode_daemon.engine.cuda.plan import Plan
from decode_daemon.engine.cuda.products import SLOTS, SQUARE
from decode_daemon.engine.cuda.ring import Cut, Ring, RingError, compiled, cut_for, pack, unusable
from decode_daemon.engine.cuda.tiled import Tiled, multiplier_for
from tests.unit.engine.test_engine_cuda_step import PLAIN, interpreter, random_weights

__all__ = ["interpreter"]

CPU = torch.device("cpu")
CUT = Cut(16, 256)
H200 = 132  # its multiprocessors


def place(row: int, column: int, inputs: int, cut: Cut, rows: int, first_line: int = 0) -> int:
    """Where ring.cu looks for an element: tile, stage, 8 lines by 32 columns, line, column."""
    tile, line = row // rows, first_line + row % rows
    at = column // cut.columns * cut.columns
    groups = min(cut.columns, inputs - at) // 32
    block = line // 8 * groups + (column - at) // 32
    return (tile * cut.lines * inputs) + at * cut.lines + block * 256 + line % 8 * 32 + column % 32


@pytest.mark.parametrize(("outputs", "inputs", "cut"), [(48, 512, CUT), (37, 608, CUT), (33, 1056, Cut(32, 512))])
def test_each_element_lies_where_the_kernel_looks_for_it(outputs: int, inputs: int, cut: Cut) -> None:
    matrix = torch.randn(outputs, inputs)
    flat = pack(matrix, cut, gated=False).flatten()
    for row in range(outputs):
        places = [place(row, column, inputs, cut, cut.lines) for column in range(inputs)]
        assert torch.equal(flat[places], matrix[row])


def test_a_tile_of_a_gated_matrix_has_as_many_gates_as_ups() -> None:
    gates, ups = torch.randn(20, 288), torch.randn(20, 288)
    flat = pack(torch.cat([gates, ups]), CUT, gated=True).flatten()
    for row in range(20):
        for line, half in ((0, gates), (8, ups)):
            places = [place(row, column, 288, CUT, 8, line) for column in range(288)]
            assert torch.equal(flat[places], half[row])


def test_the_last_tiles_rest_is_zeros() -> None:
    packed = pack(torch.ones(17, 64), CUT, gated=False)
    assert packed.shape == (32, 64)
    assert packed.sum() == 17 * 64


@pytest.mark.parametrize(
    ("outputs", "gated", "cut"),
    [
        (4096, False, Cut(32, 512)),  # 128 tiles of 32 rows for 132 multiprocessors
        (6144, False, Cut(16, 1024)),  # 48 rows at the most, not 64
        (14336, True, Cut(32, 512)),
        (2048, False, Cut(16, 1024)),  # 64 tiles of 32 would leave half of them idle
    ],
)
def test_rows_are_shared_evenly_among_the_multiprocessors(outputs: int, gated: bool, cut: Cut) -> None:
    assert cut_for(outputs, H200, gated=gated) == cut


def test_a_block_has_a_multiprocessor_for_itself_and_leaves_room_for_attention() -> None:
    for cut in (Cut(32, 512), Cut(16, 1024)):
        for width in (1, 2, 4, 8):
            size = Ring._stages(cut, width)[1]
            assert 227 * 1024 / 2 < size <= 227 * 1024 - 16 * 1024


def test_an_embedding_that_is_the_packed_head_gives_its_rows(interpreter: Executor) -> None:
    interpreter.submit(check_embed).result()


def check_embed() -> None:
    from decode_daemon.engine.cuda.ends import embed

    table = torch.randn(50, 608).bfloat16()
    ids, gain = torch.tensor([3, 49, 17, 16]), torch.ones(608).bfloat16()
    x, scaled, squares = torch.zeros(8, 608).bfloat16(), torch.zeros(8, 608), torch.ones(5, 8, dtype=torch.int64)
    embed[(4,)](
        *(x, scaled, squares, ids, pack(table, CUT, gated=False), gain),
        norms=5,
        hidden=608,
        block=1024,
        overlap=False,
        lines=CUT.lines,
        columns=CUT.columns,
    )
    assert torch.equal(x[:4], table[ids])
    assert torch.equal(scaled[:4], table[ids].float())
    assert squares[1:, :4].eq(0).all()


def test_a_head_that_is_the_embedding_is_packed_once_and_stays_one_tensor() -> None:
    fields = []

    def packed(field: str, tensor: torch.Tensor) -> torch.Tensor:
        fields.append(field)
        return tensor.clone()

    tied = random_weights(replace(PLAIN, tied=True))
    there = on_device(tied, CPU, packed=packed)
    assert there.head is there.embedding
    assert fields.count("head") == 1
    assert "embedding" not in fields


def test_without_a_gpu_products_are_tritons_and_say_why() -> None:
    found = multiplier_for(PLAIN, CPU, quantized=False, overlap=False, plan=Plan())
    assert isinstance(found, Tiled)
    assert found.name == "triton, because there is no GPU"


def test_inputs_that_do_not_fill_a_block_are_named() -> None:
    assert (
        unusable(replace(PLAIN, hidden=64, heads=4, head_dim=16, intermediate=72), CPU)
        == "intermediate_size is 72, no multiple of 32"
    )


def test_a_missing_cuda_bindings_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ModuleNotFoundError("No module named 'cuda'")

    monkeypatch.setattr(ring, "_bindings", missing)
    assert unusable(replace(PLAIN, hidden=64, heads=4, intermediate=96), CPU) == (
        "cuda-bindings cannot be imported (No module named 'cuda'): install what PyTorch's CUDA build asks for"
    )


def test_where_the_ring_cannot_be_compiled_products_are_tritons_and_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RingError("ring.cu does not compile for sm_90: no room\nand more")

    monkeypatch.setattr(ring, "compiled", broken)
    hopper(monkeypatch)
    found = multiplier_for(
        replace(PLAIN, hidden=64, heads=4, intermediate=96), torch.device("cuda"), quantized=False, overlap=True, plan=Plan()
    )
    assert found.name == "triton, because ring.cu does not compile for sm_90: no room"


def test_fp8_weights_are_multiplied_by_tritons_products() -> None:
    found = multiplier_for(PLAIN, torch.device("cuda"), quantized=True, overlap=True, plan=Plan())
    assert found.name == "triton, because weights are fp8"


def hopper(monkeypatch: pytest.MonkeyPatch, room: int = 227 * 1024) -> None:
    """Have PyTorch describe an H200 whose blocks may have `room` bytes of shared memory."""
    properties = SimpleNamespace(multi_processor_count=H200, major=9, minor=0, shared_memory_per_block_optin=room)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)


def test_a_gpu_whose_blocks_have_too_little_shared_memory_takes_tritons_products(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper(monkeypatch, room=101_376)
    found = multiplier_for(
        replace(PLAIN, hidden=64, heads=4, intermediate=96), torch.device("cuda"), quantized=False, overlap=True, plan=Plan()
    )
    assert found.name == "triton, because a block may have 101376 bytes of shared memory, and the ring takes up to 200000"


@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("cut", [Cut(32, 512), Cut(16, 1024)])
def test_kernels_compile_and_have_the_sizes_that_python_takes_them_to_have(cut: Cut, gated: bool, architecture: str) -> None:
    fields = [f"sizeof(Arguments) == {ctypes.sizeof(ring._Arguments)}"]
    fields += [
        f"__builtin_offsetof(Arguments, {name}) == {getattr(ring._Arguments, name).offset}"
        for name in (field[0] for field in ring._Arguments._fields_)
    ]
    fields += [f"THREADS == {ring._THREADS}", f"WARPS == {ring._WARPS}", f"GROUP == {ring._GROUP}", f"PAD == {ring._PAD}"]
    fields += [f"BLOCK == {ring._BLOCK_ROWS * ring._GROUP * 2}", f"SLOTS == {SLOTS}", f"SQUARE == {SQUARE.value}"]
    for width in (1, 8):
        stages, size = Ring._stages(cut, width)
        kind = f"Cut<{width}, {str(gated).lower()}, {cut.lines}, {cut.columns}, {stages}>"
        sizes = [*fields, f"{stages} * {kind}::STAGE + 2 * {kind}::SUMS * 4 + 2 * {stages} * 8 == {size}"]
        checks = "".join(f"static_assert(({one}));" for one in sizes)
        image, name = compiled(architecture, Ring._expression(width, gated, cut), checks)
        assert image.startswith(b"\x7fELF")
        assert b"product" in name


def test_what_does_not_compile_is_an_error_with_the_compilers_words() -> None:
    with pytest.raises(RingError, match=r"ring.cu does not compile for sm_90: (?s:.*)static assertion failed"):
        compiled("sm_90", Ring._expression(1, False, Cut(24, 512)))


def test_what_the_driver_refuses_is_an_error_with_its_name() -> None:
    class Status(int):
        name = "CUDA_ERROR_INVALID_VALUE"

    with pytest.raises(RingError, match="loading product<1> failed with CUDA_ERROR_INVALID_VALUE: the engine needs the driver"):
        ring._done((Status(1),), "loading product<1>")
