"""Whether steps of other plans are right: against the PyTorch step in float32, and against itself at every width."""

import torch

from benchmarks.gpu.checks import CASES
from benchmarks.gpu.shapes import random_weights
from decode_daemon.engine.cuda.model import CudaModel, on_device
from decode_daemon.engine.cuda.plan import Attention, Plan
from decode_daemon.engine.model import LlamaModel

_PROMPT = 1013  # so that widths up to 8 cross from the first bucket into the second, at 1,024
_CONTEXT = 2500
_FINER = Attention(warps=4, programs=1024, most_splits=128)


def check_prepared(case: str) -> list[tuple[str, bool]]:
    """Return what was compared for a small model of `CASES` with random bfloat16 weights, and whether it holds."""
    config = CASES[case]
    device = torch.device("cuda")
    weights = random_weights(config, torch.bfloat16, device, seed=11, scale=0.06)
    exact = LlamaModel(config, on_device(weights, device, torch.float32), _CONTEXT)
    plain = LlamaModel(config, weights, _CONTEXT)
    ids = torch.randint(0, config.vocab_size, (_PROMPT + 16,), generator=torch.Generator().manual_seed(3)).to(device)
    exact.forward(ids[:_PROMPT], 0)
    plain.cache[:, :, :, :_PROMPT] = exact.cache[:, :, :, :_PROMPT]
    wanted, usual = exact.forward(ids[_PROMPT:], _PROMPT), plain.forward(ids[_PROMPT:], _PROMPT)
    found = []
    plans = {"prepared": Plan("prepared"), "tensor": Plan("tensor", attention=_FINER), "fused": Plan(attention=_FINER)}
    for name, plan in plans.items():
        model = CudaModel(config, weights, _CONTEXT, device=device, plan=plan)
        rows: dict[int, torch.Tensor] = {}
        for width in range(1, 9):
            model.cache.fill_(float("nan"))  # positions that nobody has written must not be read
            model.cache[:, :, :, :_PROMPT] = exact.cache[:, :, :, :_PROMPT]
            parts = [model.forward(ids[at : at + width], at) for at in range(_PROMPT, ids.shape[0], width)]
            rows[width] = torch.cat(parts)
        error, limit = _error(rows[1], wanted), 1.5 * _error(usual, wanted)
        found.append((f"{case}, {name}: relative error {error:.2e} (at most {limit:.2e})", error <= limit))
        unequal = [width for width in rows if not torch.equal(rows[width], rows[1])]
        found.append((f"{case}, {name}: widths not bit-equal {unequal}", not unequal))
    return found


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())
