"""Whether the lane serves a request exactly: each field by its row in the table, then what fields say together.

What only a model's card can settle, such as which token ids there are, is gateway/plan.py's.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.body import Body
from gateway.endpoints import Endpoint
from gateway.fields import FIELDS
from gateway.grammars import is_constraint

_REQUIRED = {Endpoint.CHAT: ("messages", "model"), Endpoint.COMPLETIONS: ("prompt", "model")}
_NOT_PARSED = ("stop", "logprobs", "include_stop_str_in_output")


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Why plain vLLM serves the request: `reason` has few values (a metric's label), `detail` is for people."""

    reason: str
    detail: str
    param: str | None = None
    retry_after_s: int = 1  # where it is worth coming again


def unsupported(field: str, detail: str) -> Unsupported:
    """Return why a known field sends the request to plain vLLM."""
    return Unsupported(f"unsupported_{field}", detail, field)


def why_not(endpoint: Endpoint, body: Body, *, tools: bool = False, reasoning: bool = False) -> Unsupported | None:
    """Say why the lane does not serve this request; None if it does.

    `tools`: vLLM's own tool parser can be reached. `reasoning`: vLLM has a parser that looks at every chat completion.
    """
    for required in _REQUIRED[endpoint]:
        if body.get(required) is None:
            return Unsupported(f"missing_{required}", f"{required} is missing", required)
    if body.has_lone_surrogates():
        return Unsupported("invalid_unicode", "a string has half of a surrogate pair, which no encoding can carry")
    return (
        _by_itself(endpoint, body)
        or _together(body)
        or (_tools(body) if endpoint is Endpoint.CHAT else None)
        or _parsers(endpoint, body, tools=tools, reasoning=reasoning)
    )


def calls_tools(body: Body) -> bool:
    """Whether the answer to an admitted chat completion may be a tool call."""
    return body.get("tools") is not None and body.get("tool_choice") != "none"


def _by_itself(endpoint: Endpoint, body: Body) -> Unsupported | None:
    rows = FIELDS[endpoint]
    for key, value in body.items():
        row = rows.get(key)
        if row is None:
            if value is not None:
                return Unsupported("unknown_field", f"field {key!r} is not one the latency lane knows", key)
        elif value is None:
            if not row.nullable:
                return unsupported(key, f"{key!r} may not be null")
        elif not row.admits(value):
            return unsupported(key, f"the latency lane does not serve this value of {key!r}")
    return None


def _together(body: Body) -> Unsupported | None:
    """Say which admitted fields vLLM refuses together."""
    if body.get("stream_options") and not body.get("stream"):
        return unsupported("stream_options", "stream_options without stream")
    if body.get("top_logprobs") and not body.get("logprobs"):
        return unsupported("top_logprobs", "top_logprobs without logprobs")
    if body.get("continue_final_message") and body.get("add_generation_prompt"):
        return unsupported("continue_final_message", "continue_final_message together with add_generation_prompt")
    if body.get("structured_outputs") is not None and is_constraint(body.get("response_format")):
        return unsupported("structured_outputs", "structured_outputs together with response_format")
    return None


def _tools(body: Body) -> Unsupported | None:
    tools, choice = body.get("tools"), body.get("tool_choice")
    if choice is None and "tool_choice" in body:
        # A parser of vLLM's takes null for "auto", with and without tools; no other part of vLLM does.
        return unsupported("tool_choice", "tool_choice is null")
    if choice not in (None, "none") and tools is None:
        return unsupported("tool_choice", "tool_choice without tools")
    if isinstance(choice, Mapping) and choice["function"]["name"] not in [tool["function"]["name"] for tool in tools]:
        return unsupported("tool_choice", "tool_choice names none of the tools")
    return None


def _parsers(endpoint: Endpoint, body: Body, *, tools: bool, reasoning: bool) -> Unsupported | None:
    """Say what cannot be served where vLLM's parsers make the answer: they know nothing of stop strings and logprobs."""
    chat = endpoint is Endpoint.CHAT
    called = chat and calls_tools(body)
    parsed = called or (reasoning and chat)
    if called and not tools:
        return unsupported("tools", "tools, and no parser of vLLM's to make tool calls of an answer")
    if body.get("include_reasoning") is False and not parsed:
        return unsupported("include_reasoning", "include_reasoning is false, and vLLM may have a parser that then hides more")
    asked = [key for key in _NOT_PARSED if body.get(key)] if parsed else []
    if called or reasoning:
        # With reasoning vLLM constrains what follows the thoughts only, on both endpoints; tools have a grammar of their own.
        constrained = is_constraint(body.get("response_format"))
        asked += ["response_format"] if constrained else []
        asked += ["structured_outputs"] if body.get("structured_outputs") is not None else []
    if not asked:
        return None
    key, cause = asked[0], "tools" if called else "reasoning"
    return Unsupported(f"unsupported_{key}_with_{cause}", f"the latency lane does not serve {key!r} together with {cause}", key)
