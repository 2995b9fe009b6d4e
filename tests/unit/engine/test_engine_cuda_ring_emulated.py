"""What the kernels of ring.cu compute, their own source compiled for a CPU: rings that go round, tails, and every epilogue."""

from collections.abc import Iterator
from itertools import product as pairs
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from decode_daemon.engine.cuda.ring import Cut, Ring, pack
from tests.kit.emulated import EmulatedRing

WIDTHS = (1, 2, 4, 8)
CUTS = (Cut(32, 512), Cut(16, 1024))
EPS = 1e-5
GRID = 2  # blocks, so that each has several tiles


@pytest.fixture(scope="module")
def kernels() -> Iterator[EmulatedRing]:
    with TemporaryDirectory() as folder:
        yield EmulatedRing(Path(folder), pairs(WIDTHS, (False, True), CUTS))


def case(kind: str, inputs: int, outputs: int, cut: Cut) -> dict[str, torch.Tensor]:
    """Return the tensors of a product of `kind`, its matrix not packed yet."""
    generator = torch.Generator().manual_seed(inputs)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    gated = kind == "gated"
    found = {"x": tensor(8, inputs), "weight": tensor(outputs * (2 if gated else 1), inputs) * inputs**-0.5}
    found["out"] = tensor(8, outputs) if kind == "residual" else torch.full((8, outputs), float("nan")).bfloat16()
    if kind in ("gated", "bias", "peaks"):
        found["squares"] = (found["x"].double().pow(2).sum(1) * 2**24).long()
    if kind == "bias":
        found["addend"] = tensor(outputs)
    if kind == "residual":
        found["gain"] = tensor(outputs)
        found["scaled"] = torch.full((8, outputs), float("nan")).bfloat16()
        found["next_squares"] = torch.zeros(8, dtype=torch.int64)
    if kind == "peaks":
        found["peaks"] = torch.full((8, 64), -(2**63), dtype=torch.int64)
    return found


def wanted(kind: str, given: dict[str, torch.Tensor]) -> torch.Tensor:
    x = given["x"].double()
    sums = x @ given["weight"].double().T
    if "squares" in given:
        sums *= torch.rsqrt(x.pow(2).mean(1, keepdim=True) + EPS)
    if kind == "gated":
        gates, ups = sums.chunk(2, dim=1)
        return torch.nn.functional.silu(gates) * ups
    return sums + (given["out"].double() if kind == "residual" else given["addend"].double() if kind == "bias" else 0)


def computed(kernels: EmulatedRing, kind: str, width: int, cut: Cut, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    gated, outputs = kind == "gated", given["out"].shape[1]
    tensors = {name: tensor.clone() for name, tensor in given.items()}
    tensors["weight"] = pack(given["weight"], cut, gated=gated)
    if kind == "residual":
        tensors["addend"] = tensors["out"]
    late = [name for name in ("x", "squares") if name in tensors] + (["out"] if kind == "residual" else [])
    said = kernels.run((width, gated, cut), tensors, late, outputs=outputs, eps=EPS, grid=GRID, seed=width)
    assert said == ""
    return tensors


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("kind", ["plain", "gated", "bias", "residual", "peaks"])
def test_a_ring_that_goes_round_gives_the_product_and_a_row_the_same_at_every_width(
    kernels: EmulatedRing, kind: str, cut: Cut
) -> None:
    inputs, outputs = 4 * cut.columns + 96, 5 * (cut.lines // 2 if kind == "gated" else cut.lines) + 3
    assert 2 * max(Ring._stages(cut, width)[0] for width in WIDTHS) < 3 * 5  # stages of the first block: it laps the ring
    given = case(kind, inputs, outputs, cut)
    found = {width: computed(kernels, kind, width, cut, given) for width in WIDTHS}
    widest = found[8]
    torch.testing.assert_close(widest["out"].double(), wanted(kind, given), rtol=2**-7, atol=2**-9)
    for width, one in found.items():
        for name in ("out", "scaled", "next_squares", "peaks"):
            if name in one:
                assert torch.equal(one[name][:width], widest[name][:width]), (width, name)
    if kind == "residual":
        out = widest["out"].float()
        assert torch.equal(widest["scaled"], (out * given["gain"].float()).bfloat16())
        assert torch.equal(widest["next_squares"], (out * out * 2**24).long().sum(1))
    if kind == "peaks":
        best = 0x7FFFFFFF - (widest["peaks"].max(dim=1).values & 0xFFFFFFFF)
        assert torch.equal(best, widest["out"].float().argmax(1))


def test_a_value_that_is_not_finite_tops_a_rows_peaks(kernels: EmulatedRing) -> None:
    given = case("peaks", 512, 40, CUTS[0])
    given["weight"][17, 3] = float("inf")
    found = computed(kernels, "peaks", 4, CUTS[0], given)
    assert (found["peaks"][:4].max(dim=1).values >> 32).eq(0x7FFFFFFF).all()


@pytest.mark.parametrize(
    "edit",
    [
        ("            barrier_wait(empty + slot * 8, parity);\n", ""),  # a stage is overwritten while it is read
        ("            barrier_wait(full + slot * 8, parity);\n", ""),  # a stage is read before it is there
        ("            parity ^= 1;\n", ""),
        ("        meet<WARPS * LANES>();\n", ""),  # sums are added up before all are there
        ("                barrier_arrive(empty + slot * 8);", "                ;"),
        ("        wait_for_kernel_before();\n", ""),  # x is read before it is written
        ("turn ^= 1", "turn ^= 0"),  # a tile's sums overwrite those of the one before
    ],
)
def test_a_wait_that_is_left_out_is_noticed(tmp_path: Path, edit: tuple[str, str]) -> None:
    cut = CUTS[0]
    kernels = EmulatedRing(tmp_path, [(4, False, cut)], edit)
    given = case("plain", 4 * cut.columns, 6 * cut.lines, cut)
    tensors = dict(given, weight=pack(given["weight"], cut, gated=False), out=given["out"].clone())
    right = wanted("plain", given)[:4]
    for seed in range(8):
        failed = kernels.run((4, False, cut), tensors, ["x"], outputs=6 * cut.lines, eps=EPS, grid=GRID, seed=seed)
        if failed or not torch.allclose(tensors["out"][:4].double(), right, rtol=2**-7, atol=2**-9):
            return
    pytest.fail("nobody noticed")
