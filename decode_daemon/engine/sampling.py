"""Turns logits into a token id: vLLM 0.32's parameters, with its meaning and order (v1/sample/sampler.py).

Randomness is counter-based: a number depends on (seed, position) and on nothing drawn before it. A step can be redone, or
several positions drawn in any order, and the answer stays the same; so does one that another engine began.
"""

import math
import secrets
from collections.abc import Sequence
from typing import NamedTuple

import torch

from decode_daemon.engine.adjustments import Adjustment, MinTokens, weighing, withholding
from decode_daemon.engine.limits import check_sampling
from decode_daemon.engine.protocol import Constraint, EngineError, SamplingParams, TokenLogprobs

# vLLM's SamplingParams: below the first value a temperature means greedy; between the two it is raised to the second.
GREEDY_BELOW = 1e-5
LOWEST_TEMPERATURE = 1e-2

# Top-p rarely keeps more tokens than this; looking at these first costs a quarter of sorting 49,152 logits.
_TOP_P_FIRST_LOOK = 1024

_CPU = torch.device("cpu")
_LARGEST = torch.finfo(torch.float32).max
_WORD = (1 << 64) - 1
_PHILOX_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_PHILOX_KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_PHILOX_ROUNDS = 10


class Choice(NamedTuple):
    """A chosen id, with its logprobs if the request asks for them."""

    token: int
    logprobs: TokenLogprobs | None


class Sampler:
    """Chooses the tokens of one request, each in the light of those before it.

    `accept` is told every token of the answer, in order, whoever chose it; `choose` changes nothing that shows.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        *,
        prompt_ids: Sequence[int] = (),
        constraint: Constraint | None = None,
        device: torch.device = _CPU,
    ) -> None:
        """Begin an answer to `prompt_ids`, which hold no id of it, with `constraint` at its beginning.

        The logits will be on `device`. A seed is drawn if `params` have none. Raises EngineError naming a value of theirs that
        is out of range.
        """
        check_sampling(params, vocab_size)
        self.params = params
        self.seed = secrets.randbits(64) if params.seed is None else params.seed & _WORD
        self._greedy = params.temperature < GREEDY_BELOW
        self._constraint = constraint
        self._answer: list[int] = []
        self._min_tokens: MinTokens | None = None
        if params.min_tokens and params.ending_token_ids:
            self._min_tokens = MinTokens(params.ending_token_ids, device, constrained=constraint is not None)
        self._adjustments: list[Adjustment] = [
            *withholding(params, vocab_size, device),
            *([self._min_tokens] if self._min_tokens else []),
            *weighing(params, vocab_size, prompt_ids, device),
        ]

    @property
    def takes_the_largest(self) -> bool:
        """Whether nothing but the largest logit matters now, so that a model may choose for itself."""
        return self._greedy and self._constraint is None and self.params.logprobs is None and not self._adjustments

    def accept(self, ids: Sequence[int]) -> None:
        """Add `ids` to the answer; raises EngineError for one that the constraint does not let come there."""
        for token in ids:
            if self._constraint is not None:
                self._constraint.accept(token)
            self._answer.append(token)
        if self._min_tokens is not None and len(self._answer) >= self.params.min_tokens:
            self._adjustments.remove(self._min_tokens)
            self._min_tokens = None

    def choose(self, logits: torch.Tensor, position: int) -> Choice:
        """Return the id for `position` from the logits [vocab] of the position before it.

        Raises EngineError when a logit is not finite, since a token drawn from it would mean nothing, and when every id is
        withheld.
        """
        logits = self.constrained(logits, position)
        adjusted = self.adjusted(logits, position)
        if self._greedy:
            token = int(adjusted.argmax())
        else:
            token = draw(distribution(adjusted, self.params), uniform(self.seed, position))
        wanted = self.params.logprobs
        return Choice(token, None if wanted is None else token_logprobs(logits, token, wanted))

    def constrained(self, logits: torch.Tensor, position: int) -> torch.Tensor:
        """Return the model's logits [vocab] in float32, under the constraint's mask: what logprobs are taken from."""
        logits = logits.float()
        low, high = torch.aminmax(logits)
        if not math.isfinite(low.item()) or not math.isfinite(high.item()):
            raise EngineError(f"the logits for position {position} are not finite: the KV cache or the weights are damaged")
        mask = self._constraint.mask() if self._constraint is not None else None
        return logits if mask is None else logits.masked_fill(~mask.to(logits.device), -math.inf)

    def adjusted(self, logits: torch.Tensor, position: int) -> torch.Tensor:
        """Return what a token is chosen from, float32 [vocab]: the largest of it, or a draw from its `distribution`."""
        if self._adjustments:
            logits = logits.clone()
            for adjustment in self._adjustments:
                adjustment.apply(logits, self._answer)
        highest = logits.max().item()
        if highest == -math.inf:
            raise EngineError(
                f"no id is left for position {position}: the grammar, allowed_token_ids, bad_words and min_tokens together "
                "withhold every one; loosen one of them"
            )
        if not abs(highest) / (1.0 if self._greedy else temperature(self.params)) < _LARGEST:
            raise EngineError(
                f"the logits for position {position} leave float32's range under repetition_penalty "
                f"{self.params.repetition_penalty} and temperature {self.params.temperature}: bring them nearer to 1"
            )
        return logits


def token_logprobs(logits: torch.Tensor, token: int, alternatives: int) -> TokenLogprobs:
    """Return the logprobs of `token` and of the `alternatives` most probable ids, from float32 logits [vocab]."""
    # A batch of one, as in vLLM: torch.topk's order of equal values may depend on the shape.
    logprobs = logits.unsqueeze(0).log_softmax(dim=-1)
    top = torch.topk(logprobs, alternatives, dim=-1)
    return TokenLogprobs(float(logprobs[0, token]), tuple(top.indices[0].tolist()), tuple(top.values[0].tolist()))


def temperature(params: SamplingParams) -> float:
    """Return what logits are divided by; not for greedy `params`."""
    return max(params.temperature, LOWEST_TEMPERATURE)


def distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return the probabilities that a token is drawn with, float32 [vocab], zero outside min_p, top-k and top-p.

    Min-p keeps the tokens that are at least `min_p` times as probable as the most probable one; top-k every token that ties
    with the k-th; top-p the fewest of the rest whose probabilities, renormalised after top-k, add up to at least `top_p`.
    `params.temperature` must not be greedy.
    """
    scaled = logits.float() / temperature(params)
    if params.min_p:
        probabilities = scaled.softmax(dim=-1)
        scaled = scaled.masked_fill(probabilities < probabilities.max() * params.min_p, -math.inf)
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
