"""Tokens follow the distribution that was asked for, and depend on nothing but seed and position."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from decode_daemon.engine.protocol import SamplingParams
from decode_daemon.engine.sampling import Sampler, distribution, draw, philox, uniform

LOGITS = torch.tensor([1.2, -0.4, 2.1, 0.3, -1.7, 0.9, 1.6, -0.2, 0.0, 0.6])
VOCAB = len(LOGITS)
DRAWS = 5000


def exact_probabilities(params: SamplingParams, logits: list[float]) -> dict[int, float]:
    """Temperature, then min-p, then top-k, then top-p, written out over plain floats."""
    ranked = sorted(enumerate(logits), key=lambda pair: -pair[1])
    weights = {token: math.exp(logit / params.temperature) for token, logit in ranked}
    weights = {token: weight for token, weight in weights.items() if weight >= params.min_p * max(weights.values())}
    weights = dict(list(weights.items())[: params.top_k or None])
    kept: dict[int, float] = {}
    for token, weight in weights.items():
        if sum(kept.values()) >= params.top_p * sum(weights.values()):
            break
        kept[token] = weight
    return {token: weight / sum(kept.values()) for token, weight in kept.items()}


def assert_drawn_by(sampler: Sampler, wanted: dict[int, float]) -> None:
    counts = Counter(sampler.choose(LOGITS, position).token for position in range(DRAWS))
    assert set(counts) <= set(wanted)
    chi_square = sum((counts[token] - DRAWS * p) ** 2 / (DRAWS * p) for token, p in wanted.items())
    freedom = len(wanted) - 1
    # Mean and variance of chi-square are its degrees of freedom and twice that; four deviations above is 1 in 1,000 or less.
    assert chi_square <= freedom + 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1.0),
        SamplingParams(0.6),
        SamplingParams(1.8),
        SamplingParams(1.0, top_k=4),
        SamplingParams(1.0, top_p=0.7),
        SamplingParams(0.8, top_k=6, top_p=0.85),
        SamplingParams(1.3, top_k=3, top_p=0.4),
        SamplingParams(1.0, min_p=0.2),
        SamplingParams(1.7, min_p=0.1, top_k=7, top_p=0.9),
    ],
)
def test_draws_follow_the_exact_probabilities(params: SamplingParams) -> None:
    assert_drawn_by(Sampler(replace(params, seed=20240611), VOCAB), exact_probabilities(params, LOGITS.tolist()))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    ("params", "penalised"),
    [
        ({"presence_penalty": 1.5}, [1.2, -0.4, 0.6, 0.3, -3.2, 0.9, 0.1, -0.2, 0.0, 0.6]),
        ({"frequency_penalty": -0.5}, [1.2, -0.4, 3.1, 0.3, -1.2, 0.9, 2.1, -0.2, 0.0, 0.6]),
        ({"repetition_penalty": 2.0}, [0.6, -0.4, 1.05, 0.3, -3.4, 0.9, 0.8, -0.4, 0.0, 0.6]),
        (
            {"repetition_penalty": 2.0, "frequency_penalty": 0.25, "presence_penalty": 0.5},
            [0.6, -0.4, 0.05, 0.3, -4.15, 0.9, 0.05, -0.4, 0.0, 0.6],
        ),
    ],
)
def test_draws_follow_the_penalised_probabilities(params: dict[str, float], penalised: list[float], temperature: float) -> None:
    """The prompt has ids 0 and 7, the answer 2 twice, 4 and 6 once: only repetition looks at the prompt."""
    wanted = SamplingParams(temperature, seed=7, **params)  # type: ignore[arg-type]
    sampler = Sampler(wanted, VOCAB, prompt_ids=[0, 7, 7])
    sampler.accept([2, 4, 6, 2])
    assert_drawn_by(sampler, exact_probabilities(wanted, penalised))


@pytest.mark.parametrize("top_k", [0, 1, 40, 2000, 9999])
@pytest.mark.parametrize("top_p", [1.0, 0.999, 0.5, 1e-6])
@pytest.mark.parametrize("temperature", [0.3, 5.0])  # 5.0 is flat: its top-p keeps more than the first look
def test_the_distribution_equals_transformers_logit_warpers(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(3)) * 4
    scores = TemperatureLogitsWarper(temperature)(None, logits.unsqueeze(0))
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    got = distribution(logits, SamplingParams(temperature, top_p=top_p, top_k=top_k))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, scores[0].softmax(dim=-1), rtol=1e-4, atol=1e-7)


def test_top_k_keeps_every_token_that_ties_with_the_kth() -> None:
    kept = distribution(torch.tensor([3.0, 1.0, 2.0, 2.0, 0.0]), SamplingParams(1.0, top_k=2))
    assert kept.nonzero().flatten().tolist() == [0, 2, 3]


def test_min_p_keeps_every_token_as_probable_as_its_share_of_the_best() -> None:
    kept = distribution(torch.tensor([3.0, 1.0, 3.0, 2.0, 2.9]), SamplingParams(1.0, min_p=1.0))
    assert kept.tolist() == [0.5, 0.0, 0.5, 0.0, 0.0]


def test_temperature_zero_takes_the_largest_logit() -> None:
    sampler = Sampler(SamplingParams(0.0, top_p=0.1, top_k=1), VOCAB)
    assert {sampler.choose(LOGITS, position).token for position in range(20)} == {2}


def test_a_tiny_temperature_is_raised_as_vllm_raises_it() -> None:
    logits = torch.tensor([0.0, 0.01])
    tiny = distribution(logits, SamplingParams(0.0001))
    assert torch.equal(tiny, distribution(logits, SamplingParams(0.01)))


def test_the_same_seed_gives_the_same_tokens_in_any_order() -> None:
    params = SamplingParams(1.0, seed=-5)
    forwards = [Sampler(params, VOCAB).choose(LOGITS, position) for position in range(50)]
    sampler = Sampler(params, VOCAB)
    backwards = [sampler.choose(LOGITS, position) for position in reversed(range(50))]
    assert forwards == backwards[::-1]


def test_positions_seeds_and_streams_draw_apart() -> None:
    draws = {uniform(seed, position, stream) for seed in range(5) for position in range(5) for stream in range(5)}
    assert len(draws) == 125
    assert all(0 <= u < 1 for u in draws)


def test_requests_without_a_seed_get_different_ones() -> None:
    assert Sampler(SamplingParams(1.0), VOCAB).seed != Sampler(SamplingParams(1.0), VOCAB).seed


@pytest.mark.parametrize(("counter", "key"), [((1, 0, 0, 0), (0, 0)), ((2**64 - 1, 7, 0, 3), (2**63 + 11, 2**40))])
def test_philox_equals_numpys(counter: tuple[int, int, int, int], key: tuple[int, int]) -> None:
    # numpy counts up before its first block.
    before = np.array([counter[0] - 1, *counter[1:]], dtype=np.uint64)
    wanted = np.random.Philox(counter=before, key=np.array(key, dtype=np.uint64)).random_raw(4)
    assert list(philox(counter, key)) == wanted.tolist()


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-53])
def test_a_draw_never_returns_a_token_of_probability_zero(u: float) -> None:
    assert draw(torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0]), u) in (1, 3)
