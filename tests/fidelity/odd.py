"""Cases of what is wrong or odd with a request, and of limits: vLLM's word for it must reach the client byte for byte."""

import json
from typing import Any

from tests.fidelity.case import ABSENT, CAPITAL, MODEL, Case, Fields, Path, chat, spread, text

CONTEXT_TOKENS = 1024
"""Of the stack that these cases are for: prompt and answer together."""

_CAPITAL_TEXT = "The capital of France is"

# Values that vLLM refuses.
_REFUSED: dict[str, Fields] = {
    "temperature -1": {"temperature": -1},
    "temperature 3": {"temperature": 3},
    "temperature as a word": {"temperature": "hot"},
    "top_p 0": {"top_p": 0},
    "top_p 1.5": {"top_p": 1.5},
    "top_k -2": {"top_k": -2},
    "top_k 1.5": {"top_k": 1.5},
    "min_p 2": {"min_p": 2},
    "presence_penalty 3": {"presence_penalty": 3},
    "frequency_penalty -3": {"frequency_penalty": -3},
    "repetition_penalty 0": {"repetition_penalty": 0},
    "seed too large": {"seed": 2**63},
    "max_tokens 0": {"max_tokens": 0},
    "max_tokens -1": {"max_tokens": -1},
    "max_tokens beyond the context": {"max_tokens": CONTEXT_TOKENS + 1},
    "min_tokens over max_tokens": {"min_tokens": 11},
    "min_tokens -1": {"min_tokens": -1},
    "n 0": {"n": 0},
    "n 2, greedy": {"n": 2},
    "stop empty string": {"stop": ""},
    "stop, one of them empty": {"stop": ["", "."]},
    "17 stops": {"stop": [f"stop {number}" for number in range(17)]},
    "stop a number": {"stop": 5},
    "stop_token_ids out of range": {"stop_token_ids": [10**6]},
    "stop_token_ids negative": {"stop_token_ids": [-1]},
    "allowed_token_ids out of range": {"allowed_token_ids": [10**6]},
    "allowed_token_ids empty": {"allowed_token_ids": []},
    "logit_bias of no id": {"logit_bias": {"Paris": 1}},
    "logit_bias out of range": {"logit_bias": {"1000000": 1}},
    "bad_words with an empty one": {"bad_words": ["a", ""]},
    "stream_options without stream": {"stream_options": {"include_usage": True}},
    "a regex that is none": {"structured_outputs": {"regex": "(["}},
    "a grammar that is none": {"structured_outputs": {"grammar": "root ::= ("}},
    "two constraints": {"structured_outputs": {"regex": "a", "choice": ["a"]}},
    "no constraint": {"structured_outputs": {}},
    "json_schema without one": {"response_format": {"type": "json_schema"}},
    "response_format of another type": {"response_format": {"type": "yaml"}},
    "another model": {"model": "no-such-model"},
    "cache_salt too long": {"cache_salt": "s" * 129},
}

_CHAT: dict[str, Fields] = {
    "no messages": {"messages": []},
    "messages absent": {"messages": ABSENT},
    "messages no list": {"messages": "hello"},
    "a message without a role": {"messages": [{"content": CAPITAL}]},
    "top_logprobs without logprobs": {"top_logprobs": 2},
    "top_logprobs 21": {"logprobs": True, "top_logprobs": 21},
    "top_logprobs as text": {"logprobs": True, "top_logprobs": "2"},
    "tools empty": {"tools": []},
    "tool_choice without tools": {"tool_choice": "required"},
    "continued and prompted": {"continue_final_message": True, "add_generation_prompt": True},
    "another model, streaming": {"model": "no-such-model", "stream": True},
    "temperature -1, streaming": {"temperature": -1, "stream": True},
}

_TEXT: dict[str, Fields] = {
    "an empty prompt": {"prompt": ""},
    "a list of an empty prompt": {"prompt": [""]},
    "no prompt in a list": {"prompt": []},
    "prompt absent": {"prompt": ABSENT},
    "prompt null": {"prompt": None},
    "a prompt of ids beyond the vocabulary": {"prompt": [504, 10**6]},
    "a prompt of negative ids": {"prompt": [504, -3]},
    "a mixed prompt": {"prompt": [504, "of"]},
    "logprobs 21": {"logprobs": 21},
    "logprobs -2": {"logprobs": -2},
    "logprobs as text": {"logprobs": "1"},
}


def _ids(count: int) -> list[int]:
    return [504 + number % 97 for number in range(count)]


def _bytes(name: str, body: bytes, *, error: bool = True, **options: Any) -> Case:
    return Case(f"body: {name}", Path.CHAT, body, error=error, **options)


def _bodies() -> list[Case]:
    """D3: bodies that are no request, and some that look as if they were none."""
    good: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": CAPITAL}],
        "temperature": 0,
        "max_tokens": 4,
    }
    whole = json.dumps(good).encode()
    return [
        _bytes("malformed", b'{"model": "smollm2", "messages": [], x}'),
        _bytes("a list", b"[]"),
        _bytes("a string", b'"text"'),
        _bytes("empty", b""),
        _bytes("null", b"null"),
        _bytes("no UTF-8", b'{"model": "smollm2\xff"}'),
        _bytes("cut short", whole[:-5]),
        _bytes("NaN", whole[:-1] + b', "temperature": NaN}'),
        _bytes("text/plain", whole, headers={"content-type": "text/plain"}),
        _bytes("stream as text", whole[:-1] + b', "stream": "true"}', error=False, reason="unsupported_stream", param="stream"),
        _bytes("duplicate keys", whole[:-1] + b', "max_tokens": 3}', error=False),
        _bytes(
            "spaces and escapes",
            b"  " + json.dumps(good, indent=3).replace("France", "Fr\\u0061nce").encode() + b"\n",
            error=False,
        ),
        _bytes("a byte order mark", b"\xef\xbb\xbf" + whole, error=False, reason="invalid_json"),
        _bytes("an integer as 4.0", whole[:-2] + b"4.0}", error=False, reason="unsupported_max_tokens", param="max_tokens"),
        _bytes("nested deeply", whole[:-1] + b', "x": ' + b"[" * 2000 + b"]" * 2000 + b"}"),
    ]


def _limits() -> list[Case]:
    """D8: prompts as long as the context, one less and two less."""
    table: dict[str, Fields] = {
        "two less, two tokens": {"prompt": _ids(CONTEXT_TOKENS - 2), "max_tokens": 2},
        "two less, one token": {"prompt": _ids(CONTEXT_TOKENS - 2), "max_tokens": 1},
        "two less, three tokens": {"prompt": _ids(CONTEXT_TOKENS - 2), "max_tokens": 3},
        "one less, one token": {"prompt": _ids(CONTEXT_TOKENS - 1), "max_tokens": 1},
        "one less, two tokens": {"prompt": _ids(CONTEXT_TOKENS - 1), "max_tokens": 2},
        "all of it": {"prompt": _ids(CONTEXT_TOKENS), "max_tokens": 1, "error": True},
        "more than all of it": {"prompt": _ids(CONTEXT_TOKENS + 1), "max_tokens": 1, "error": True},
    }
    salted = {f"a prompt as long as the context, {name}": {**fields, "cache_salt": name} for name, fields in table.items()}
    room: dict[str, Any] = {"cache_salt": "room", "ignore_eos": True, "max_tokens": None, "question": " ".join(["word"] * 985)}
    return [*spread(salted, paths=(Path.COMPLETIONS,), streaming="no"), chat("chat: the rest of the context", **room)]


def _together() -> list[Case]:
    """B3: a stop and the length limit at once, one less and one more."""
    stops = {f"a stop beside the limit of {limit}": {"stop": [" is"], "max_tokens": limit} for limit in (4, 5, 6)}
    return spread(stops, paths=(Path.CHAT,), streaming="both")


def cases() -> list[Case]:
    """Return the odd cases."""
    refused = {name: {**fields, "error": True} for name, fields in _REFUSED.items()}
    chats = {name: {**fields, "error": True} for name, fields in _CHAT.items()}
    texts = {name: {**fields, "error": True} for name, fields in _TEXT.items()}
    return [
        *spread(refused, streaming="no"),
        *spread(chats, paths=(Path.CHAT,), streaming="no"),
        *spread(texts, paths=(Path.COMPLETIONS,), streaming="no"),
        *_bodies(),
        *_limits(),
        *_together(),
        text("text: as many tokens as the prompt is long", prompt=_CAPITAL_TEXT, max_tokens=5),
    ]
