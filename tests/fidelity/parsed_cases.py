"""Answers that vLLM's own parsers make, on a stack with the hermes tool parser: what may become of tools that are offered.

The model copies what its earlier turns show, so that it calls tools of its own accord.
"""

import json
from collections.abc import Iterator
from typing import Any

from tests.fidelity.case import ABSENT, Case, Fields, Path, chat, spread

_USAGE = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def _tool(name: str, schema: dict[str, Any], *, strict: bool = False) -> dict[str, Any]:
    (member,) = schema
    parameters = {"type": "object", "properties": schema, "required": [member], "additionalProperties": False}
    function = {"name": name, "description": f"Tells the {member}.", "parameters": parameters}
    return {"type": "function", "function": function | ({"strict": True} if strict else {})}


_CITY = {"city": {"type": "string", "enum": ["Paris", "Rome"]}}
_ZONE = {"zone": {"type": "integer"}}
_WEATHER, _TIME = _tool("get_weather", _CITY), _tool("get_time", _ZONE)
_STRICT = [_tool("get_weather", _CITY, strict=True), _tool("get_time", _ZONE, strict=True)]
_NAMED = {"type": "function", "function": {"name": "get_weather"}}


def _call(city: str) -> str:
    return "<tool_call>\n" + json.dumps({"name": "get_weather", "arguments": {"city": city}}) + "\n</tool_call>"


def _turns(*answered: tuple[str, str], question: str) -> dict[str, Any]:
    turns = [
        {"role": role, "content": text} for turn in answered for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    return {"messages": [*turns, {"role": "user", "content": question}]}


_CALLING = _turns(
    *((f"Weather in {city}?", _call(city)) for city in ("Rome", "Berlin", "Madrid")),
    question="Weather in Paris?",
)
_CALLING_TWICE = _turns(
    *(
        (f"Weather in {one} and {other}?", f"I will ask.\n{_call(one)}\n{_call(other)}")
        for one, other in (("Rome", "Oslo"), ("Berlin", "Bern"), ("Madrid", "Vienna"))
    ),
    question="Weather in Paris and London?",
)
_TALKING: dict[str, Any] = {"messages": [{"role": "user", "content": "What is the weather in Paris?"}]}
_EMOJI = _turns(("Reply with 🙂🙃 and 日本語", "🙂🙃 日本語 🙂🙃 日本語"), question="Again.")

SERVED: dict[str, Fields] = {
    "a tool is called": {**_CALLING, "tools": [_WEATHER], "max_tokens": 80},
    "a tool is called, auto said": {
        **_CALLING,
        "tools": [_WEATHER],
        "tool_choice": "auto",
        "max_tokens": ABSENT,
        "again": True,
    },
    "a strict tool is called": {**_CALLING, "tools": _STRICT, "max_tokens": 80},
    "two calls after some text": {**_CALLING_TWICE, "tools": [_WEATHER], "max_tokens": 120},
    "one of two calls": {**_CALLING_TWICE, "tools": [_WEATHER], "parallel_tool_calls": False, "max_tokens": 120},
    "a call cut off in its arguments": {**_CALLING, "tools": [_WEATHER], "max_tokens": 25},
    "a call cut off before its name": {**_CALLING, "tools": [_WEATHER], "tool_choice": "auto", "max_tokens": 8},
    "a call, with token ids": {**_CALLING, "tools": [_WEATHER], "max_tokens": 80, "return_token_ids": True, "again": True},
    "no call": {**_TALKING, "tools": [_WEATHER, _TIME], "max_tokens": 20},
    "no call, to the end": {**_turns(question="Say hi."), "tools": [_WEATHER], "max_tokens": 80},
    "no call, characters of many tokens": {**_EMOJI, "tools": [_WEATHER], "max_tokens": 40},
    "tools that must not be called": {**_CALLING, "tools": [_WEATHER], "tool_choice": "none", "max_tokens": 30},
    "required": {**_TALKING, "tools": _STRICT, "tool_choice": "required", "max_tokens": 80},
    "required, not strict": {**_TALKING, "tools": [_TIME], "tool_choice": "required", "max_tokens": 40},
    "required, cut off": {**_TALKING, "tools": _STRICT, "tool_choice": "required", "max_tokens": 30},
    "required, one token": {**_TALKING, "tools": _STRICT, "tool_choice": "required", "max_tokens": 1},
    "named": {**_TALKING, "tools": _STRICT, "tool_choice": _NAMED, "max_tokens": 80},
    "named, cut off": {**_TALKING, "tools": _STRICT, "tool_choice": _NAMED, "max_tokens": 25},
    "the first token ends the answer": {**_TALKING, "tools": [_WEATHER], "logit_bias": {"2": 100}},
    "a stop id": {**_CALLING, "tools": [_WEATHER], "stop_token_ids": [39428], "max_tokens": 80},
    "special tokens are in the text": {**_TALKING, "tools": [_WEATHER], "logit_bias": {"1": 100}, "max_tokens": 4},
}
"""The lane's, streaming and not."""

COUNTED: dict[str, Fields] = {
    "a call, usage in every chunk": {**_CALLING, **_USAGE, "tools": [_WEATHER], "max_tokens": 80, "again": True},
    "a call, usage and token ids": {
        **_CALLING,
        **_USAGE,
        "tools": [_WEATHER],
        "return_token_ids": True,
        "max_tokens": 60,
    },
    "required, usage in every chunk": {
        **_TALKING,
        **_USAGE,
        "tools": _STRICT,
        "tool_choice": "required",
        "max_tokens": 80,
        "again": True,
    },
}
"""The lane's, streaming."""

PLAIN: dict[str, tuple[str, Fields]] = {
    "stop strings": ("stop", {**_CALLING, "tools": [_WEATHER], "stop": ["Paris"], "max_tokens": 40}),
    "logprobs": ("logprobs", {**_CALLING, "tools": [_WEATHER], "logprobs": True, "max_tokens": 20}),
    "a response format": ("response_format", {**_TALKING, "tools": _STRICT, "response_format": {"type": "json_object"}}),
}
"""Plain vLLM's, by the field that stands in the way: only tokens can be sent to the parsers, and they know no logprobs."""

REFUSED: dict[str, Fields] = {
    "required, no tools": {"tool_choice": "required"},
    "named, not among the tools": {"tools": [_TIME], "tool_choice": _NAMED},
    "an unknown tool_choice": {"tools": [_TIME], "tool_choice": "sometimes"},
    "tools without a name": {"tools": [{"type": "function", "function": {}}]},
}
"""What vLLM has an error for."""


def cases() -> Iterator[Case]:
    """Yield the cases of a stack that parses tool calls."""
    yield from spread({f"tools: {name}": fields for name, fields in SERVED.items()}, streaming="both", paths=(Path.CHAT,))
    yield from spread({f"tools: {name}": fields for name, fields in COUNTED.items()}, streaming="no", paths=(Path.CHAT,))
    for name, (field, fields) in PLAIN.items():
        yield chat(f"chat: tools: {name}", reason=f"unsupported_{field}_with_tools", param=field, **fields)
    for name, fields in REFUSED.items():
        yield chat(f"chat: tools: {name}", error=True, **fields)
