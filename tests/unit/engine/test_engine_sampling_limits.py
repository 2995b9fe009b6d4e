"""Nothing is decoded with a value out of range: the refusal names the field, the value and the range."""

import math

import pytest

from decode_daemon.engine.limits import check_lengths, check_sampling
from decode_daemon.engine.protocol import DecodeParams, EngineError, SamplingParams

VOCAB = 10


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(-0.1), "temperature is -0.1; it must be from 0"),
        (SamplingParams(2.1), "temperature is 2.1; .* to 2"),
        (SamplingParams(math.nan), "temperature is nan"),
        (SamplingParams(math.inf), "temperature is inf"),
        (SamplingParams(1.0, top_p=0.0), "top_p is 0.0; it must be above 0"),
        (SamplingParams(1.0, top_p=1.1), "top_p is 1.1; .* at most 1"),
        (SamplingParams(1.0, top_k=-2), "top_k is -2; it must be at least 1, or 0"),
        (SamplingParams(1.0, min_p=-0.1), "min_p is -0.1; it must be from 0"),
        (SamplingParams(1.0, min_p=1.1), "min_p is 1.1; .* to 1"),
        (SamplingParams(1.0, presence_penalty=2.1), "presence_penalty is 2.1; it must be from -2 to 2"),
        (SamplingParams(1.0, frequency_penalty=math.nan), "frequency_penalty is nan; it must be from -2 to 2"),
        (SamplingParams(1.0, repetition_penalty=0.0), "repetition_penalty is 0.0; .* above 0"),
        (SamplingParams(1.0, repetition_penalty=math.inf), "repetition_penalty is inf; .* finite"),
        (SamplingParams(1.0, min_tokens=-1), "min_tokens is -1; it must be at least 0"),
        (SamplingParams(1.0, logprobs=-1), "logprobs is -1; it must be from 0 to the vocabulary's 10 ids"),
        (SamplingParams(1.0, logprobs=11), "logprobs is 11; it must be from 0 to the vocabulary's 10 ids"),
        (SamplingParams(1.0, logit_bias={3: 100.5}), "logit_bias is 100.5 for id 3; it must be from -100 to 100"),
        (SamplingParams(1.0, logit_bias={3: math.nan}), "logit_bias is nan for id 3"),
        (SamplingParams(1.0, logit_bias={10: 1.0}), "logit_bias has id 10; .* the ids 0 to 9"),
        (SamplingParams(1.0, allowed_token_ids=(1, -1)), "allowed_token_ids has id -1; .* the ids 0 to 9"),
        (SamplingParams(1.0, bad_words=((1,), (2, 10))), "bad_words has id 10; .* the ids 0 to 9"),
        (SamplingParams(1.0, bad_words=((1,), ())), "bad_words .* empty sequence"),
        (SamplingParams(1.0, min_tokens=1, ending_token_ids=frozenset({12})), "ending_token_ids has id 12"),
    ],
)
def test_a_sampling_value_out_of_range_is_refused_by_name(params: SamplingParams, message: str) -> None:
    with pytest.raises(EngineError, match=f"^{message}"):
        check_sampling(params, VOCAB)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(2.0, top_p=1e-9, top_k=10**9, min_p=1.0, seed=-(2**63)),
        SamplingParams(0.0, presence_penalty=-2.0, frequency_penalty=2.0, repetition_penalty=1e-9, logprobs=VOCAB),
        SamplingParams(0.0, top_k=-1, logit_bias={0: -100.0, 9: 100.0}, allowed_token_ids=(0, 9), bad_words=((0, 9),)),
        SamplingParams(0.0, ending_token_ids=frozenset({12})),  # nothing is withheld, so nothing is looked up
    ],
)
def test_a_value_at_the_end_of_its_range_is_accepted(params: SamplingParams) -> None:
    check_sampling(params, VOCAB)


def lengths(max_tokens: int, answered: int = 0, min_tokens: int = 0) -> DecodeParams:
    return DecodeParams(SamplingParams(0.0, min_tokens=min_tokens), max_tokens, frozenset(), answered=answered)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (lengths(0), "max_tokens is 0; it must be at least 1"),
        (lengths(5, answered=4), "answered is 4; it must be from 0 to the prompt's 3 ids"),
        (lengths(5, answered=-1), "answered is -1"),
        (lengths(5, min_tokens=6), "min_tokens is 6; it must be at most the answer's 5 tokens"),
        (lengths(5, answered=2, min_tokens=8), r"min_tokens is 8; .* 7 tokens \(2 answered before, max_tokens 5\)"),
    ],
)
def test_lengths_that_contradict_each_other_are_refused(params: DecodeParams, message: str) -> None:
    with pytest.raises(EngineError, match=f"^{message}"):
        check_lengths(params, prompt_tokens=3)


@pytest.mark.parametrize("params", [lengths(1), lengths(5, min_tokens=5), lengths(5, answered=3, min_tokens=8)])
def test_lengths_that_just_fit_are_accepted(params: DecodeParams) -> None:
    check_lengths(params, prompt_tokens=3)
