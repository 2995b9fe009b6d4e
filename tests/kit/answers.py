"""Hypothesis: requests, and answers to them that a model could give or never would."""

import math
from typing import Any

from hypothesis import strategies as st
from tokenizers import Tokenizer

from gateway.endpoints import Endpoint
from gateway.tokens import TokenLogprobs
from tests.kit.scripts import Script, byte_tokenizer, sentencepiece_tokenizer

_STOPS = ["aab", "ab", "b", "op", "stop", ". ", "🙂", "本", "\n", "é", "<call>", "<end>", "the", " "]
_NATURAL = st.one_of(st.floats(-12000, 0, width=32), st.just(-math.inf))
_OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "include_stop_str_in_output": st.booleans(),
    "min_tokens": st.sampled_from([0, 0, 1, 3]),
    "skip_special_tokens": st.booleans(),
    "spaces_between_special_tokens": st.booleans(),
    "ignore_eos": st.booleans(),
    "return_token_ids": st.booleans(),
    "return_tokens_as_token_ids": st.sampled_from([True, False, None]),
}
_STREAM_OPTIONS = st.fixed_dictionaries({}, optional={"include_usage": st.booleans(), "continuous_usage_stats": st.booleans()})


@st.composite
def exchanges(draw: st.DrawFn, endpoint: Endpoint, *, logprobs: bool = True) -> tuple[dict[str, Any], Script]:
    """A request's fields, and what a model answers."""
    tokenizer = draw(st.sampled_from([byte_tokenizer(), sentencepiece_tokenizer()]))
    token = tokens_of(tokenizer)
    ids = tuple(draw(st.one_of(st.lists(token, min_size=6, max_size=12), st.lists(token, min_size=1, max_size=5))))
    fields: dict[str, Any] = draw(st.fixed_dictionaries({}, optional=_OPTIONS))
    ending = draw(st.sampled_from(["stop", "stop", "stop_token_ids", None]))
    if ending == "stop":
        stops = stops_in(tokenizer.decode(ids[: len(ids) // 2 + 1], skip_special_tokens=False))
        fields["stop"] = draw(st.one_of(stops, st.lists(stops, min_size=1, max_size=3)))
    elif ending == "stop_token_ids":
        fields["stop_token_ids"] = draw(st.lists(st.sampled_from(ids), max_size=2))
    fields["max_tokens"] = draw(st.one_of(st.just(len(ids)), st.integers(1, len(ids))))
    fields["min_tokens"] = min(fields.get("min_tokens", 0), fields["max_tokens"])
    alternatives = draw(st.sampled_from([None, 0, 1, 3])) if logprobs else None
    told: tuple[TokenLogprobs, ...] = ()
    if alternatives is not None:
        counted = {"top_logprobs": alternatives, "logprobs": True}
        fields |= counted if endpoint is Endpoint.CHAT else {"logprobs": alternatives}
        told = tuple(draw(logprobs_of(tokenizer, token, alternatives)) for token in ids)
    prompt = draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), min_size=1, max_size=8).map(tuple))
    return fields, Script(ids, told, tokenizer, prompt, "the prompt", draw(st.sampled_from(["fp-1", None])))


def with_stream_options(endpoint: Endpoint) -> st.SearchStrategy[tuple[dict[str, Any], Script]]:
    """The same for a request that streams."""
    return st.tuples(exchanges(endpoint), st.none() | _STREAM_OPTIONS).map(
        lambda drawn: (drawn[0][0] if drawn[1] is None else {**drawn[0][0], "stream_options": drawn[1]}, drawn[0][1])
    )


def cuts() -> st.SearchStrategy[list[int]]:
    """Counts of tokens that batches end at."""
    return st.lists(st.integers(1, 12), max_size=6)


def tokens_of(tokenizer: Tokenizer) -> st.SearchStrategy[int]:
    """Any token; often an added one, or one with text of its own."""
    added = sorted(tokenizer.get_added_tokens_decoder())
    whole = [token for token in range(tokenizer.get_vocab_size()) if "\ufffd" not in tokenizer.decode([token])]
    return st.one_of(*[st.integers(0, tokenizer.get_vocab_size() - 1), st.sampled_from(whole)] * 8, st.sampled_from(added))


def stops_in(text: str) -> st.SearchStrategy[str]:
    """Stop strings, most of which a text has."""
    others = st.sampled_from(_STOPS)
    if not text:
        return others
    parts = st.tuples(st.integers(0, len(text) - 1), st.integers(1, 6)).map(lambda part: text[part[0] : part[0] + part[1]])
    return st.one_of(parts, parts, others)


@st.composite
def logprobs_of(draw: st.DrawFn, tokenizer: Tokenizer, token: int, alternatives: int) -> TokenLogprobs:
    """What a sampler tells of a token: that one's, and as many of the most probable as are asked for."""
    others = st.one_of(st.just(token), tokens_of(tokenizer))
    ids = draw(st.lists(others, min_size=alternatives, max_size=alternatives, unique=True))
    values = sorted(draw(st.lists(_NATURAL, min_size=alternatives, max_size=alternatives)), reverse=True)
    top = tuple(zip(ids, values, strict=True))
    return TokenLogprobs(dict(top).get(token, draw(_NATURAL)), top)
