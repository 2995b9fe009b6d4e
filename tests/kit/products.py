"""What `decode_daemon.engine.cuda.products.product` must give, whatever its weights are kept as."""

from collections.abc import Mapping

import torch

Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # out, out times the next norm's gain, counted sums of squares of out


def is_the_product(
    rows: Mapping[int, Rows],
    weight: torch.Tensor,
    x: torch.Tensor,
    addend: torch.Tensor,
    *,
    square: torch.Tensor | None,
    gain: torch.Tensor | None,
    gated: bool,
) -> None:
    """Check `rows`, by width up to 8: a row is the same at every width, and that of float64.

    `weight` is in float64; `square`: sums of squares of what `x` was before its norm's gain; `gain`: of the norm that follows;
    `addend`: bias or residual, of what is not `gated`.
    """
    from decode_daemon.engine.cuda.products import SQUARE  # Triton is imported where it interprets

    for width in (1, 2, 4):
        for found, wide in zip(rows[width], rows[8], strict=True):
            assert torch.equal(found, wide[:width])
    y = x.double() @ weight.T
    if square is not None:
        y *= torch.rsqrt(square.double() / x.shape[1] + 1e-5)[:, None]
    if gated:
        gates, ups = y.chunk(2, dim=1)
        y = torch.nn.functional.silu(gates) * ups
    else:
        y += addend.double()
    out, scaled, squares = rows[8]
    torch.testing.assert_close(out, y.float(), rtol=1e-5, atol=1e-5)
    if gain is not None:
        torch.testing.assert_close(scaled, (y * gain).float(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(squares / SQUARE.value, y.square().sum(1).float(), rtol=1e-5, atol=1e-5)
