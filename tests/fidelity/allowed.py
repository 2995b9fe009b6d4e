"""Every difference between the lanes that is allowed, one by one, with its reason. All others are faults."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.fidelity.case import Case

TOLERANCE = 2e-3
"""Largest difference of two logprobs of the same token: float32, and kernels that add in another order."""

MISSING = "(not there)"
"""Stands for what one of two answers does not have."""

_CREATED_S = 300
_ID = re.compile(r"(chatcmpl|cmpl)-.{36}")
_LOGPROB = re.compile(r"logprob$|token_logprobs\[\d+\]$")
_TOOL_CALL_ID = re.compile(r"tool_calls\[\d+\]\.id$")
_DRAWN = re.compile(
    r"(^|\.)(text|content|token_ids|finish_reason|stop_reason|completion_tokens|total_tokens|logprobs.*)$|^shape of the end"
)


@dataclass(frozen=True, slots=True)
class Allowed:
    """One allowed difference: where, how far, and why."""

    what: str
    reason: str
    holds: Callable[[Case, str, Any, Any], bool]


def _close(_: Case, path: str, plain: Any, lane: Any) -> bool:
    return bool(_LOGPROB.search(path)) and _numbers(plain, lane) and abs(plain - lane) <= TOLERANCE


def _ids(_: Case, path: str, plain: Any, lane: Any) -> bool:
    forms = [_ID.fullmatch(value) if isinstance(value, str) else None for value in (plain, lane)]
    return path == "id" and all(forms) and forms[0][1] == forms[1][1]  # type: ignore[index]


def _times(_: Case, path: str, plain: Any, lane: Any) -> bool:
    return path == "created" and type(plain) is type(lane) is int and abs(plain - lane) <= _CREATED_S


def _numbers(*values: Any) -> bool:
    return all(isinstance(value, float) for value in values)


def _without_null_content(shape: str) -> str:
    return re.sub(r"content: null, (?=(reasoning: null, )?tool_calls)", "", shape)


def _header(*names: str) -> Callable[[Case, str, Any, Any], bool]:
    return lambda case, path, plain, lane: path.removeprefix("header ") in names and path.startswith("header ")


ALLOWED = (
    Allowed("id", "every answer has its own; the form is vLLM's", _ids),
    Allowed("created", "the time of the answer", _times),
    Allowed("logprob", f"kernels round differently: within {TOLERANCE:g}", _close),
    Allowed(
        "tool call id",
        "drawn anew for each call",
        lambda case, path, plain, lane: bool(_TOOL_CALL_ID.search(path)) and type(plain) is type(lane) is str,
    ),
    Allowed(
        "content: null beside tool_calls, in a stream",
        "vLLM's derender endpoint does not tell whether a parser left the content open or said null",
        lambda case, path, plain, lane: path.startswith("shape of ") and lane in map(_without_null_content, plain),
    ),
    Allowed(
        "drawn tokens",
        "vLLM draws with torch's generator, the daemon with a counter: a seed repeats an answer in its own lane only",
        lambda case, path, plain, lane: case.sampled and bool(_DRAWN.search(path)),
    ),
    Allowed(
        "x-slo-lane, x-slo-reason, server-timing",
        "what the lane says of itself",
        _header("x-slo-lane", "x-slo-reason", "server-timing"),
    ),
    Allowed("date, x-envoy-upstream-service-time", "times", _header("date", "x-envoy-upstream-service-time")),
    Allowed(
        "connection: close",
        "Envoy ends a connection on which the answer came before it had passed on the whole request",
        lambda case, path, plain, lane: path == "header connection" and lane in ("close", MISSING),
    ),
    Allowed(
        "content-length, transfer-encoding",
        "the lane does not know the length when it begins",
        _header("content-length", "transfer-encoding"),
    ),
)

UNSEEN = (
    (
        "where a stream is cut",
        "a chunk holds the tokens that were there: text, ids and logprobs are joined before they are compared",
    ),
    ("order of equally probable alternatives", "it is left open, and so are tokens of logprob -9999, which cannot come"),
    ("which prefix was cached", "prompts of a block and more carry a cache_salt of their lane's own"),
)
"""Differences that the comparison does not see, and why none is looked for."""


def reason_for(case: Case, path: str, plain: Any, lane: Any) -> str | None:
    """Return why this difference is allowed; None where it is not."""
    for entry in ALLOWED:
        if entry.holds(case, path, plain, lane):
            return entry.reason
    return None
