"""Whether the CUDA step is right: against the PyTorch step in float32, and against itself at every width."""

from dataclasses import dataclass, replace

import torch

from benchmarks.gpu.shapes import LLAMA_8B, random_weights
from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.cuda.model import CudaModel, on_device
from decode_daemon.engine.cuda.quantized import WeightsKind, quantized
from decode_daemon.engine.model import LlamaModel

_SMALL = replace(
    LLAMA_8B, layers=3, hidden=512, intermediate=1408, heads=8, kv_heads=2, head_dim=128, vocab_size=4099, max_positions=4096
)
CASES = {
    "llama": _SMALL,
    "llama, tied, dim 64, 3 heads a KV head": replace(_SMALL, hidden=576, heads=9, kv_heads=3, head_dim=64, tied=True),
    "qwen2: bias, 7 heads a KV head": replace(_SMALL, heads=14, head_dim=64, qkv_bias=True, rope_scaling=None),
    "qwen3: QK norm": replace(_SMALL, qk_norm=True, kv_heads=8, rope_scaling=None),
    # Matrices whose tiles go round the ring several times in each of its blocks, as those of any real model do.
    "llama, the 8B's own matrices": replace(LLAMA_8B, layers=2, max_positions=4096),
}
FP8_CASES = {
    "fp8 weights": _SMALL,
    "fp8 weights, whole passes": replace(_SMALL, hidden=1024, intermediate=4096),
}
_PROMPT = 1013  # so that widths up to 8 and the greedy steps cross from the first bucket into the second, at 1,024
_CONTEXT = 2500
_SCALE = 0.06  # deviation of weights: wide enough for attention and norms to matter


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison: `value` has to be at most `limit`."""

    case: str
    what: str
    value: float
    limit: float

    @property
    def met(self) -> bool:
        """Whether it holds; a NaN never does."""
        return self.value <= self.limit


def check(
    case: str,
    config: LlamaConfig,
    device: torch.device,
    *,
    overlap: bool = True,
    ranks: int = 1,
    weights_as: WeightsKind = "as-is",
) -> list[Check]:
    """Return all comparisons for a model of `config` with random bfloat16 weights, on `ranks` GPUs.

    With `weights_as` "fp8" what it is held against is computed with the rounded weights, in bfloat16 and in float32.
    """
    weights = random_weights(config, torch.bfloat16, device, seed=11, scale=_SCALE)
    model = CudaModel(config, weights, _CONTEXT, device=device, overlap=overlap, ranks=ranks, weights_as=weights_as)
    held = quantized(weights, device).dequantized(torch.float32) if weights_as == "fp8" else weights
    exact = LlamaModel(config, on_device(held, device, torch.float32), _CONTEXT)
    plain = LlamaModel(config, on_device(held, device, torch.bfloat16), _CONTEXT)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, config.vocab_size, (_PROMPT + 16,), generator=generator).to(device)
    exact.forward(ids[:_PROMPT], 0)
    for other in (plain.cache, model.cache):
        other.fill_(float("nan"))  # positions that nobody has written must not be read
        other[:, :, :, :_PROMPT] = exact.cache[:, :, :, :_PROMPT]
    wanted = exact.forward(ids[_PROMPT:], _PROMPT)
    found = model.forward(ids[_PROMPT:], _PROMPT)
    written = slice(_PROMPT, _PROMPT + 16)
    kv = model.cache[:, :, :, written].clone()
    plain_logits = plain.forward(ids[_PROMPT:], _PROMPT)
    checks = [
        # Added in another order, bfloat16 is as wrong as the PyTorch step's own; half as much again is room.
        Check(case, "logits, relative error", _error(found, wanted), 1.5 * _error(plain_logits, wanted)),
        Check(case, "KV written, relative error", _error(kv, exact.cache[:, :, :, written]), 0.02),
        *_widths(case, model, ids, found, kv),
        *_greedy(case, model, exact, int(ids[_PROMPT])),
    ]
    model.close()
    return checks


def _widths(case: str, model: CudaModel, ids: torch.Tensor, logits: torch.Tensor, kv: torch.Tensor) -> list[Check]:
    """Compare, bit for bit, 16 rows in steps of 8 with the same rows in steps of every other width."""
    checks = []
    for width in range(1, 9):
        model.cache[:, :, :, _PROMPT:].fill_(float("nan"))
        rows = [
            model.forward(ids[start : start + width], start)[: ids.shape[0] - start]
            for start in range(_PROMPT, ids.shape[0], width)
        ]
        written = model.cache[:, :, :, _PROMPT : ids.shape[0]]
        unequal = (torch.cat(rows) != logits).sum() + (written != kv).sum()
        checks.append(Check(case, f"width {width}: values not bit-equal", float(unequal), 0))
    return checks


def _greedy(case: str, model: CudaModel, exact: LlamaModel, first: int, steps: int = 48) -> list[Check]:
    """Compare greedy ids with argmax of `forward`, and each with the float32 model's own choice after the same ids."""
    tokens = [first]
    for position in range(_PROMPT, _PROMPT + steps):
        best = model.greedy(tokens[-1], position)
        tokens.append(-1 if best is None else best)
        if best is None:
            return [Check(case, "greedy: not finite at step", float(position - _PROMPT), -1)]
    fed = torch.tensor(tokens[:-1], device=model.cache.device)
    again = torch.cat([model.forward(fed[n : n + 1], _PROMPT + n) for n in range(steps)])
    wanted = exact.forward(fed, _PROMPT)
    chosen = torch.tensor(tokens[1:], device=fed.device)
    gaps = wanted.max(dim=-1).values - wanted.gather(1, chosen[:, None]).squeeze(1)
    # Where two candidates lie closer than twice the largest error of a logit, either may win; further apart, only one can.
    error = (again.float() - wanted).abs().max()
    return [
        Check(case, "greedy: ids unlike forward's argmax", float((again.argmax(-1) != chosen).sum()), 0),
        Check(case, "greedy: logit behind float32's best", float(gaps.max()), float(2 * error)),
        Check(case, "greedy: ids unlike float32's", float((wanted.argmax(-1) != chosen).sum()), steps / 8),
    ]


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    found, wanted = found.double(), wanted.double()
    return float((found - wanted).norm() / wanted.norm())
