"""Turns logits into a token id, with vLLM's meaning of temperature, top-k and top-p.

Randomness is counter-based: a number depends on (seed, position) and on nothing drawn before it. A step can be redone, or
several positions drawn in any order, and the answer stays the same.
"""

import math
import secrets

import torch

from decode_daemon.engine.protocol import EngineError, SamplingParams

# vLLM's SamplingParams: below the first value a temperature means greedy; between the two it is raised to the second.
GREEDY_BELOW = 1e-5
LOWEST_TEMPERATURE = 1e-2

# Top-p rarely keeps more tokens than this; looking at these first costs a quarter of sorting 49,152 logits.
_TOP_P_FIRST_LOOK = 1024

_WORD = (1 << 64) - 1
_PHILOX_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_PHILOX_KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_PHILOX_ROUNDS = 10


class Sampler:
    """Chooses the tokens of one request."""

    def __init__(self, params: SamplingParams) -> None:
        """Check `params` and draw a seed if they carry none; raises EngineError naming the value that is out of range."""
        _check(params)
        self.params = params
        self.seed = secrets.randbits(64) if params.seed is None else params.seed & _WORD

    def choose(self, logits: torch.Tensor, position: int) -> int:
        """Return the id for `position` from the logits [vocab] of the position before it.

        Raises EngineError when a logit is not finite: a token drawn from it would mean nothing.
        """
        logits = logits.float()
        low, high = torch.aminmax(logits)
        if not math.isfinite(low.item()) or not math.isfinite(high.item()):
            raise EngineError(f"the logits for position {position} are not finite: the KV cache or the weights are damaged")
        if self.params.temperature < GREEDY_BELOW:
            return int(logits.argmax())
        return draw(distribution(logits, self.params), uniform(self.seed, position))


def distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return the probabilities that a token is drawn with, float32 [vocab], zero outside top-k and top-p.

    Top-k keeps every token that ties with the k-th; top-p keeps the fewest of the rest whose probabilities, renormalised
    after top-k, add up to at least `top_p`. `params.temperature` must not be greedy.
    """
    scaled = logits.float() / max(params.temperature, LOWEST_TEMPERATURE)
    if 0 < params.top_k < scaled.shape[0]:
        kth = torch.topk(scaled, params.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < kth, -math.inf)
    probabilities = scaled.softmax(dim=-1)
    if params.top_p < 1.0:
        nucleus = _nucleus(probabilities, params.top_p)
        kept = torch.full_like(scaled, -math.inf)
        kept[nucleus] = scaled[nucleus]
        probabilities = kept.softmax(dim=-1)
    return probabilities


def draw(probabilities: torch.Tensor, u: float) -> int:
    """Return the id whose share of the running sum of `probabilities` holds `u`, a number in [0, 1).

    An id of probability zero is never returned: the sums are float64 and `u` has 53 bits, so u * total < total.
    """
    sums = probabilities.cumsum(dim=0, dtype=torch.float64)
    return int(torch.searchsorted(sums, sums[-1] * u, right=True))


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """Return the number in [0, 1) that belongs to (seed, position, stream), with 53 random bits.

    Philox4x64-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC11), with key (seed, 0) and counter
    (position, stream, 0, 0). `stream` tells several draws at one position apart.
    """
    return (philox((position, stream, 0, 0), (seed & _WORD, 0))[0] >> 11) * 2.0**-53


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return the Philox4x64-10 block of `counter` under `key`, all 64-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_PHILOX_ROUNDS):
        left, right = _PHILOX_MULTIPLIERS[0] * c0, _PHILOX_MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (right >> 64) ^ c1 ^ k0, right & _WORD, (left >> 64) ^ c3 ^ k1, left & _WORD
        k0, k1 = (k0 + _PHILOX_KEY_STEPS[0]) & _WORD, (k1 + _PHILOX_KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Return the ids of the smallest set of tokens whose probability reaches `top_p`, most probable first."""
    vocab = probabilities.shape[0]
    for size in (min(_TOP_P_FIRST_LOOK, vocab), vocab):
        values, ids = torch.topk(probabilities, size)
        sums = values.cumsum(dim=0, dtype=torch.float64)
        if size == vocab or sums[-1].item() >= top_p:
            break
    return ids[: int(torch.searchsorted(sums, top_p)) + 1]


def _check(params: SamplingParams) -> None:
    if not 0 <= params.temperature < math.inf:
        raise EngineError(f"temperature is {params.temperature}; it must be a finite number of at least 0")
    if not 0 < params.top_p <= 1:
        raise EngineError(f"top_p is {params.top_p}; it must be above 0 and at most 1 (1 keeps every token)")
    if params.top_k < 0:
        raise EngineError(f"top_k is {params.top_k}; it must be at least 0 (0 keeps every token)")
