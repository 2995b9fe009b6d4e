"""Which values a request's sampling parameters may have: vLLM's own ranges (SamplingParams and its `verify`).

A gateway sends nothing else; what is checked here is that no other value is ever decoded with.
"""

import math
from collections.abc import Callable, Iterable
from itertools import chain

from decode_daemon.engine.protocol import DecodeParams, EngineError, SamplingParams

_HIGHEST_BIAS = 100.0  # vLLM clamps to it: `SamplingParams.from_optional`

_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda value: 0 <= value <= 2, "from 0 (greedy) to 2"),
    "top_p": (lambda value: 0 < value <= 1, "above 0 and at most 1 (1 keeps every token)"),
    "top_k": (lambda value: value >= -1, "at least 1, or 0 or -1 (both keep every token)"),
    "min_p": (lambda value: 0 <= value <= 1, "from 0 (keeps every token) to 1"),
    "presence_penalty": (lambda value: -2 <= value <= 2, "from -2 to 2"),
    "frequency_penalty": (lambda value: -2 <= value <= 2, "from -2 to 2"),
    "repetition_penalty": (lambda value: 0 < value < math.inf, "a finite number above 0 (1 has no effect)"),
    "min_tokens": (lambda value: value >= 0, "at least 0"),
}


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raise EngineError for a value of `params` out of its range, or an id outside the vocabulary, naming both."""
    for name, (allowed, wanted) in _RANGES.items():
        if not allowed(value := getattr(params, name)):
            raise EngineError(f"{name} is {value}; it must be {wanted}")
    if params.logprobs is not None and not 0 <= params.logprobs <= vocab_size:
        raise EngineError(f"logprobs is {params.logprobs}; it must be from 0 to the vocabulary's {vocab_size} ids")
    for token, bias in params.logit_bias.items():
        if not abs(bias) <= _HIGHEST_BIAS:
            raise EngineError(f"logit_bias is {bias} for id {token}; it must be from -{_HIGHEST_BIAS:g} to {_HIGHEST_BIAS:g}")
    if not all(params.bad_words):
        raise EngineError("bad_words is a list with an empty sequence of ids; leave that one out")
    _check_ids("logit_bias", params.logit_bias, vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)
    _check_ids("bad_words", chain.from_iterable(params.bad_words), vocab_size)
    # As in vLLM, a model's own ids are looked at only where they are used: some name ids that its logits have no place for.
    if params.min_tokens:
        _check_ids("ending_token_ids", params.ending_token_ids, vocab_size)


def check_lengths(params: DecodeParams, prompt_tokens: int) -> None:
    """Raise EngineError when the lengths in `params` contradict each other, or a prompt of `prompt_tokens`."""
    if params.max_tokens < 1:
        raise EngineError(f"max_tokens is {params.max_tokens}; it must be at least 1")
    if not 0 <= params.answered <= prompt_tokens:
        raise EngineError(f"answered is {params.answered}; it must be from 0 to the prompt's {prompt_tokens} ids")
    longest = params.answered + params.max_tokens
    if params.sampling.min_tokens > longest:
        raise EngineError(
            f"min_tokens is {params.sampling.min_tokens}; it must be at most the answer's {longest} tokens "
            f"({params.answered} answered before, max_tokens {params.max_tokens})"
        )


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise EngineError(f"{name} has id {token}; the model's vocabulary has the ids 0 to {vocab_size - 1}")
