"""Which request fields the lane serves, and which leg each belongs to: one row per field, everything else is plain vLLM's.

An allow-list: a field that is not in the table, or a value that a row does not admit, sends the request to vLLM untouched. So a
field is never half-applied, and a value that vLLM refuses is refused by vLLM.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from gateway.body import Body
from gateway.endpoints import Endpoint

CHAT_PATH = Endpoint.CHAT

_INT64 = 2**63
_MAX_STOPS = 4  # vLLM's own default limit (VLLM_MAX_STOP_STRINGS): it answers more of them with 400


class Leg(Enum):
    """Where a field's value goes."""

    PREFILL = "prefill"  # shapes the prompt: vLLM reads it, as it came
    DECODE = "decode"  # shapes the answer after the first token
    BOTH = "both"  # the first token and all others
    NEITHER = "neither"  # only values without effect are admitted


@dataclass(frozen=True, slots=True)
class Row:
    """One field. `admits` tells whether the lane serves this (non-null) value exactly."""

    leg: Leg
    admits: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Why plain vLLM serves the request: `reason` has few values (a metric's label), `detail` is for people."""

    reason: str
    detail: str
    param: str | None = None
    retry_after_s: int = 1  # where it is worth coming again


def _anything(_: Any) -> bool:
    return True


def _nothing(_: Any) -> bool:
    return False


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _only(*values: Any) -> Callable[[Any], bool]:
    # Types are compared too: 0, 0.0 and False are equal in Python, and not to vLLM's validation.
    return lambda value: any(value == allowed and type(value) is type(allowed) for allowed in values)


def _text_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and _text_content(m) for m in value)


def _text_content(message: dict[str, Any]) -> bool:
    content = message.get("content")
    if isinstance(content, list):
        return all(
            isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
        )
    return content is None or isinstance(content, str)


def _stops(value: Any) -> bool:
    stops = [value] if isinstance(value, str) else value
    return isinstance(stops, list) and len(stops) <= _MAX_STOPS and all(isinstance(s, str) and s for s in stops)


def _stream_options(value: Any) -> bool:
    return isinstance(value, dict) and set(value) <= {"include_usage"} and all(map(_is_bool, value.values()))


CHAT_FIELDS: dict[str, Row] = {
    # The prompt.
    "messages": Row(Leg.PREFILL, _text_messages),
    "model": Row(Leg.PREFILL, lambda value: isinstance(value, str) and bool(value)),
    "add_generation_prompt": Row(Leg.PREFILL, _is_bool),
    "continue_final_message": Row(Leg.PREFILL, _is_bool),
    "add_special_tokens": Row(Leg.PREFILL, _is_bool),
    "chat_template_kwargs": Row(Leg.PREFILL, lambda value: isinstance(value, dict)),
    "cache_salt": Row(Leg.PREFILL, lambda value: isinstance(value, str) and bool(value)),
    "user": Row(Leg.PREFILL, lambda value: isinstance(value, str)),
    # How tokens are chosen.
    "temperature": Row(Leg.BOTH, lambda value: _is_number(value) and 0 <= value <= 2),
    "top_p": Row(Leg.BOTH, lambda value: _is_number(value) and 0 < value <= 1),
    "top_k": Row(Leg.BOTH, lambda value: _is_int(value) and -1 <= value < 2**31),
    "seed": Row(Leg.BOTH, lambda value: _is_int(value) and -_INT64 <= value < _INT64),
    "ignore_eos": Row(Leg.BOTH, _is_bool),
    # Where the answer ends, and its form.
    "max_tokens": Row(Leg.DECODE, lambda value: _is_int(value) and 1 <= value < 2**31),
    "max_completion_tokens": Row(Leg.DECODE, lambda value: _is_int(value) and 1 <= value < 2**31),
    "stop": Row(Leg.DECODE, _stops),
    "stream": Row(Leg.DECODE, _is_bool),
    "stream_options": Row(Leg.DECODE, _stream_options),
    # A client has no say in where a KV cache goes: whatever it sends is dropped.
    "kv_transfer_params": Row(Leg.NEITHER, _anything),
    # Served when they ask for nothing.
    "n": Row(Leg.NEITHER, _only(1)),
    "logprobs": Row(Leg.NEITHER, _only(False)),
    "top_logprobs": Row(Leg.NEITHER, _only(0)),
    "presence_penalty": Row(Leg.NEITHER, _only(0, 0.0)),
    "frequency_penalty": Row(Leg.NEITHER, _only(0, 0.0)),
    "repetition_penalty": Row(Leg.NEITHER, _only(1, 1.0)),
    "min_p": Row(Leg.NEITHER, _only(0, 0.0)),
    "min_tokens": Row(Leg.NEITHER, _only(0)),
    "logit_bias": Row(Leg.NEITHER, _only({})),
    "stop_token_ids": Row(Leg.NEITHER, _only([])),
    "bad_words": Row(Leg.NEITHER, _only([])),
    "tools": Row(Leg.NEITHER, _nothing),
    "tool_choice": Row(Leg.NEITHER, _only("none")),
    "parallel_tool_calls": Row(Leg.NEITHER, _is_bool),
    "response_format": Row(Leg.NEITHER, _only({"type": "text"})),
    "skip_special_tokens": Row(Leg.NEITHER, _only(True)),
    "spaces_between_special_tokens": Row(Leg.NEITHER, _only(True)),
    "include_stop_str_in_output": Row(Leg.NEITHER, _only(False)),
    "use_beam_search": Row(Leg.NEITHER, _only(False)),
    "echo": Row(Leg.NEITHER, _only(False)),
    "return_token_ids": Row(Leg.NEITHER, _only(False)),
}

# Dropping a field whose only admitted values have no effect could still change a prompt: these are templates' business.
_PASSED_THROUGH = frozenset({"tool_choice", "parallel_tool_calls", "response_format"})


def why_not(body: Body) -> Unsupported | None:
    """Say why the lane does not serve this chat completion; None if it does."""
    present = body.present()
    for required in ("messages", "model"):
        if required not in present:
            return Unsupported(f"missing_{required}", f"{required} is missing", required)
    for key, value in present.items():
        row = CHAT_FIELDS.get(key)
        if row is None:
            return Unsupported("unknown_field", f"field {key!r} is not one the latency lane knows", key)
        if not row.admits(value):
            return Unsupported(f"unsupported_{key}", f"the latency lane does not serve this value of {key!r}", key)
    if "stream_options" in present and not present.get("stream"):
        return Unsupported("unsupported_stream_options", "stream_options without stream", "stream_options")
    return None


def prompt_characters(body: Body) -> int:
    """Count the characters of the messages' texts; expects a body that `why_not` has nothing against."""
    texts = [message.get("content") for message in body.get("messages")]
    parts = [part["text"] for text in texts if isinstance(text, list) for part in text]
    return sum(len(text) for text in [*texts, *parts] if isinstance(text, str))


def prefill_fields() -> list[str]:
    """Fields whose bytes go to vLLM as they came."""
    return [key for key, row in CHAT_FIELDS.items() if row.leg is Leg.PREFILL or key in _PASSED_THROUGH]


def prompt_fields() -> list[str]:
    """Fields that vLLM's /tokenize needs to count a prompt."""
    return [key for key, row in CHAT_FIELDS.items() if row.leg is Leg.PREFILL and key not in ("cache_salt", "user")]
