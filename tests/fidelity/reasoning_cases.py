"""Answers that vLLM's parser of reasoning takes apart, on a stack with deepseek_r1 beside the hermes tool parser.

The model is told by its earlier turns to think. Its tokenizer calls two tokens that no text has <think> and </think>.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tests.fidelity.case import ABSENT, Case, Fields, Path, chat, spread, text
from tests.fidelity.fields import END

MARKERS = {"<filename>": "<think>", "<repo_name>": "</think>"}
"""SmolLM2's special tokens that stand for the parser's; with these two the model copies what it is shown."""

THOUGHTS_END = 3  # </think>

_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def _call(city: str) -> str:
    return "<tool_call>\n" + json.dumps({"name": "get_weather", "arguments": {"city": city}}) + "\n</tool_call>"


def _turns(answered: Mapping[str, str], question: str) -> dict[str, Any]:
    turns = [message for user, said in answered.items() for message in (_message("user", user), _message("assistant", said))]
    return {"messages": [*turns, _message("user", question)]}


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


# A parser looks for the last marker of a prompt: each question ends with the beginning of thoughts, so that they are open.
_ANSWERING = {
    **_turns(
        {
            f"Capital of {country}? <think>": f"<think>\nThey ask about {country}.\n</think>\nIt is {city}."
            for country, city in (("Italy", "Rome"), ("Germany", "Berlin"), ("Spain", "Madrid"))
        },
        "Capital of France? <think>",
    ),
    "logit_bias": {str(THOUGHTS_END): 4, str(END): -4},
    "max_tokens": 24,
}
_CALLING = {
    **_turns(
        {
            f"Weather in {city}? <think>": f"<think>\nThey ask about {city}.\n</think>\n{_call(city)}"
            for city in ("Rome", "Berlin", "Madrid")
        },
        "Weather in Paris? <think>",
    ),
    "tools": [_WEATHER],
    "max_tokens": 60,
}
_ASKED: dict[str, Any] = {"messages": [_message("user", "What is the capital of France?")]}
_OPEN: dict[str, Any] = {"messages": [_message("user", "What is the capital of France? <think>")]}
_ENDED = _turns({"Capital of Spain?": "<think>\nThey ask about Spain.\n</think>\nIt is Madrid."}, "Capital of France?")
_USAGE = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}

_SERVED: dict[str, Fields] = {
    "thoughts, then an answer": _ANSWERING,
    "thoughts, then a call": _CALLING,
    "thoughts, then a call, hidden": {**_CALLING, "include_reasoning": False, "again": True},
    "thoughts, then an answer, with token ids": {**_ANSWERING, "return_token_ids": True},
    "thoughts, then an answer, hidden with their token ids": {
        **_ANSWERING,
        "include_reasoning": False,
        "return_token_ids": True,
    },
    "cut off in the thoughts": {**_ANSWERING, "max_tokens": 5},
    "cut off at the end of the thoughts": {**_ANSWERING, "max_tokens": 9},
    "one token": {**_ANSWERING, "max_tokens": 1},
    "no thoughts": _ASKED,
    "thoughts that began in the prompt": _OPEN,
    "thoughts that ended in the prompt": _ENDED,
    "no thoughts, to the end": {**_ASKED, "max_tokens": ABSENT, "again": True},
}
"""The lane's, streaming and not."""

_COUNTED: dict[str, Fields] = {
    "an answer, usage in every chunk": {**_ANSWERING, **_USAGE, "again": True},
    "a call, usage in every chunk": {**_CALLING, **_USAGE},
}
"""The lane's, streaming."""

_CONSTRAINT = {"choice": ["London", "Paris"]}
_PLAIN: dict[str, tuple[str, Fields]] = {
    "stop strings": ("stop", {**_ANSWERING, "stop": ["Paris"]}),
    "logprobs": ("logprobs", {**_ANSWERING, "logprobs": True}),
    "a response format": ("response_format", {**_ASKED, "response_format": {"type": "json_object"}}),
    "a constraint": ("structured_outputs", {**_ASKED, "structured_outputs": _CONSTRAINT}),
}
"""Plain vLLM's, by the field that stands in the way."""


def cases() -> Iterator[Case]:
    """Yield the cases of a stack that parses reasoning."""
    yield from spread({f"reasoning: {name}": fields for name, fields in _SERVED.items()}, streaming="both", paths=(Path.CHAT,))
    yield from spread({f"reasoning: {name}": fields for name, fields in _COUNTED.items()}, streaming="no", paths=(Path.CHAT,))
    for name, (field, fields) in _PLAIN.items():
        yield chat(f"chat: reasoning: {name}", reason=f"unsupported_{field}_with_reasoning", param=field, **fields)
    required: dict[str, Any] = {**_CALLING, "tool_choice": "required"}
    yield chat("chat: reasoning: a call that must be", reason="unsupported_structured_outputs", **required)
    # No parser looks at completions, but vLLM's grammars begin after thoughts there, too.
    yield text("text: reasoning: none")
    with_reasoning = "unsupported_structured_outputs_with_reasoning"
    yield text("text: reasoning: a constraint", reason=with_reasoning, structured_outputs=_CONSTRAINT)
