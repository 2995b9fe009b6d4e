"""The first two tokens of an answer, drawn many times: do the lane and vLLM draw from the same distribution?

The first token is drawn by vLLM in the prefill leg, the second by the daemon. What they should follow is known exactly: vLLM
tells the logprobs of a prompt's next token, and those after each first token.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.fidelity.answer import Answer
from tests.fidelity.case import MODEL, Case, Fields, Path
from tests.fidelity.lanes import BothLanes

Pair = tuple[int, ...]  # the answer's ids; one, where the first ended it
REST: Pair = ()
_KNOWN = 20  # alternatives that vLLM tells at most
_LEAST_EXPECTED = 5.0
_LEAST_PROBABLE = 1e-3  # seeds are fixed: a fit fails always or never
_PER_REQUEST = 100
_AT_ONCE = 6


@dataclass(frozen=True, slots=True)
class Setting:
    """A prompt, as ids, and how tokens are chosen."""

    name: str
    prompt: tuple[int, ...]
    fields: Fields = field(default_factory=dict)


_STORY = (6403, 1980, 253, 655, 28, 665, 436, 253)  # "Once upon a time, there was a"
SETTINGS = (
    Setting("temperature 1", _STORY, {"temperature": 1}),
    Setting(
        "top_k, top_p, min_p, presence penalty",
        _STORY,
        {"temperature": 0.9, "top_k": 8, "top_p": 0.9, "min_p": 0.05, "presence_penalty": 1.5},
    ),
)


@dataclass(frozen=True, slots=True)
class Fit:
    """How well counts fit: Pearson's chi-square, its degrees of freedom, and how probable a worse fit is."""

    statistic: float
    freedom: int

    @property
    def probability(self) -> float:
        """The probability of a fit at least this bad, if the distributions are the same."""
        half = torch.tensor([self.freedom / 2, self.statistic / 2], dtype=torch.float64)
        return float(torch.special.gammaincc(half[0], half[1]))


@dataclass(frozen=True, slots=True)
class Drawn:
    """One setting's draws: how well those of each lane fit the exact distribution, and each other."""

    setting: Setting
    count: int
    lane: Fit
    plain: Fit
    each_other: Fit

    @property
    def holds(self) -> bool:
        """Whether all of them are of one distribution."""
        return min(fit.probability for fit in (self.lane, self.plain, self.each_other)) > _LEAST_PROBABLE


async def draw(both: BothLanes, setting: Setting, count: int) -> Drawn:
    """Draw `count` answers of two tokens in each lane, and hold them against what they should be."""
    lane = await lane_draws(both, setting, count)
    plain = await plain_draws(both, setting, count)
    expected = await exact(both, setting)
    return Drawn(setting, count, fit(lane, expected), fit(plain, expected), fit_of_two(lane, plain))


async def exact(both: BothLanes, setting: Setting) -> dict[Pair, float]:
    """Return the distribution of the first two tokens, from vLLM's logprobs; REST holds what is too improbable to be told."""
    first = chosen(await _next(both, setting.prompt), setting.fields, ())
    seconds = await asyncio.gather(*(_next(both, (*setting.prompt, token)) for token in first))
    pairs: dict[Pair, float] = {}
    for (token, probability), logprobs in zip(first.items(), seconds, strict=True):
        for other, after in chosen(logprobs, setting.fields, (token,)).items():
            pairs[token, other] = probability * after
    return {**pairs, REST: max(0.0, 1.0 - sum(pairs.values()))}


def chosen(logprobs: Mapping[int, float], fields: Fields, answered: Pair) -> dict[int, float]:
    """Return the probabilities after penalties, temperature, min_p, top_k and top_p, in the order in which vLLM applies them.

    Without a truncation the tokens whose logprobs are not known keep their share.
    """
    penalty, temperature = fields.get("presence_penalty", 0.0), fields.get("temperature", 1.0)
    logits = {token: (value - penalty * (token in answered)) / temperature for token, value in logprobs.items()}
    if not {"top_k", "top_p", "min_p"} & fields.keys():
        assert (penalty, temperature) == (0.0, 1.0), "the tail is known only of the unchanged distribution"
        return {token: math.exp(value) for token, value in logits.items()}
    best = max(logits.values())
    kept = {t: v for t, v in logits.items() if math.exp(v - best) >= fields.get("min_p", 0.0)}
    kept = dict(sorted(kept.items(), key=lambda pair: -pair[1])[: fields.get("top_k", _KNOWN)])
    assert len(kept) < _KNOWN, "more tokens remain than are known"
    return _nucleus(_normal(kept), fields.get("top_p", 1.0))


def _nucleus(probabilities: dict[int, float], top_p: float) -> dict[int, float]:
    """Keep the most probable tokens until they have `top_p` together."""
    kept: dict[int, float] = {}
    for token, probability in probabilities.items():
        if sum(kept.values()) >= top_p:
            break
        kept[token] = probability
    total = sum(kept.values())
    return {token: probability / total for token, probability in kept.items()}


def _normal(logits: Mapping[int, float]) -> dict[int, float]:
    best = max(logits.values())
    weights = {token: math.exp(value - best) for token, value in logits.items()}
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


async def lane_draws(both: BothLanes, setting: Setting, count: int) -> Counter[Pair]:
    """Draw `count` answers of two tokens through the lane, one request each, with the seeds from 0."""
    at_once = asyncio.Semaphore(_AT_ONCE)

    async def draw(seed: int) -> Pair:
        async with at_once:
            answer = await both.send(_case(setting, seed=seed), in_lane=True)
        assert answer.lane == "latency", answer.reason
        return _ids(answer)[0]

    return Counter(await asyncio.gather(*map(draw, range(count))))


async def plain_draws(both: BothLanes, setting: Setting, count: int) -> Counter[Pair]:
    """Draw at least `count` answers of two tokens at plain vLLM, many with one request."""
    requests = -(-count // _PER_REQUEST)
    cases = [_case(setting, seed=number * _PER_REQUEST, n=_PER_REQUEST) for number in range(requests)]
    answers = await asyncio.gather(*(both.send(case, in_lane=False) for case in cases))
    return Counter(pair for answer in answers for pair in _ids(answer))


def fit(counts: Mapping[Pair, int], expected: Mapping[Pair, float]) -> Fit:
    """Hold counts against a distribution; cells that expect fewer than 5 are put together."""
    total = sum(counts.values())
    cells = [pair for pair, p in expected.items() if pair != REST and p * total >= _LEAST_EXPECTED]
    seen = [counts.get(pair, 0) for pair in cells]
    wanted = [expected[pair] * total for pair in cells]
    rest = total - sum(wanted)
    if rest >= _LEAST_EXPECTED:
        seen.append(total - sum(seen))
        wanted.append(rest)
    return Fit(sum((s - w) ** 2 / w for s, w in zip(seen, wanted, strict=True)), len(wanted) - 1)


def fit_of_two(one: Counter[Pair], other: Counter[Pair]) -> Fit:
    """Hold two sets of counts against each other; cells with few draws are put together."""
    share = one.total() / (one.total() + other.total())
    both = one + other
    cells = [pair for pair, count in both.items() if count * min(share, 1 - share) >= _LEAST_EXPECTED]
    rows = [(one[pair], other[pair]) for pair in cells]
    rest = (one.total() - sum(row[0] for row in rows), other.total() - sum(row[1] for row in rows))
    rows += [rest] if sum(rest) * min(share, 1 - share) >= _LEAST_EXPECTED else []
    statistic = sum(
        (count - sum(row) * part) ** 2 / (sum(row) * part)
        for row in rows
        for count, part in zip(row, (share, 1 - share), strict=True)
    )
    return Fit(statistic, len(rows) - 1)


async def _next(both: BothLanes, prompt: Pair) -> dict[int, float]:
    """Return the logprobs of the most probable next tokens."""
    fields = {"temperature": 0, "max_tokens": 1, "logprobs": _KNOWN, "return_tokens_as_token_ids": True}
    answer = await both.send(Case("next", Path.COMPLETIONS, {"model": MODEL, "prompt": list(prompt), **fields}), in_lane=False)
    [top] = answer.value["choices"][0]["logprobs"]["top_logprobs"]
    return {int(name.removeprefix("token_id:")): value for name, value in top.items()}


def _case(setting: Setting, **more: Any) -> Case:
    fields = {"model": MODEL, "prompt": list(setting.prompt), "max_tokens": 2, "return_token_ids": True}
    return Case(setting.name, Path.COMPLETIONS, {**fields, **setting.fields, **more})


def _ids(answer: Answer) -> list[Pair]:
    assert answer.status == 200, answer.raw
    return [tuple(choice["token_ids"]) for choice in answer.value["choices"]]
