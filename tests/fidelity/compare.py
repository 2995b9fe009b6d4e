"""Compares two answers to one request, field by field; what may differ is what `allowed` lists, and nothing else."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from tests.fidelity.allowed import MISSING, TOLERANCE, reason_for
from tests.fidelity.answer import Answer
from tests.fidelity.case import Case

_UNLIKELY = -9999.0  # what vLLM writes for a token that cannot come


@dataclass(frozen=True, slots=True)
class Difference:
    """One place where the answers differ. `allowed` is the reason why it may; None where it may not."""

    path: str
    plain: Any
    lane: Any
    allowed: str | None = None

    def __str__(self) -> str:
        return f"{self.path}: plain {_short(self.plain)}, lane {_short(self.lane)}"


def differences(case: Case, plain: Answer, lane: Answer) -> list[Difference]:
    """Return every difference between plain vLLM's answer and the lane's, allowed ones included."""
    found = list(_leaves("status", plain.status, lane.status))
    found += _headers(plain.headers, lane.headers)
    if plain.status >= 400 or plain.value is None:
        found += _leaves("bytes", plain.raw, lane.raw)
    else:
        found += _compare("", plain.value, lane.value)
    found += [Difference("structure", "", fault) for fault in lane.faults]
    return [Difference(d.path, d.plain, d.lane, reason_for(case, d.path, d.plain, d.lane)) for d in found]


def _headers(plain: Mapping[str, str], lane: Mapping[str, str]) -> Iterator[Difference]:
    for name in sorted(plain.keys() | lane.keys()):
        yield from _leaves(f"header {name}", plain.get(name, MISSING), lane.get(name, MISSING))


def _compare(path: str, plain: Any, lane: Any) -> Iterator[Difference]:
    if path.endswith("top_logprobs"):
        yield from _alternatives(path, plain, lane)
    elif path == "shapes":
        yield from _shapes(plain, lane)
    elif isinstance(plain, Mapping) and isinstance(lane, Mapping):
        yield from _members(path, plain, lane)
    elif isinstance(plain, list) and isinstance(lane, list):
        yield from _elements(path, plain, lane)
    else:
        yield from _leaves(path, plain, lane)


def _members(path: str, plain: Mapping[str, Any], lane: Mapping[str, Any]) -> Iterator[Difference]:
    for key in [*plain, *(key for key in lane if key not in plain)]:
        yield from _compare(f"{path}.{key}".lstrip("."), plain.get(key, MISSING), lane.get(key, MISSING))
    if plain.keys() == lane.keys() and list(plain) != list(lane):
        yield Difference(f"{path}, order of its members".lstrip(","), list(plain), list(lane))


def _elements(path: str, plain: list[Any], lane: list[Any]) -> Iterator[Difference]:
    if any(isinstance(value, Mapping | list) for value in [*plain, *lane]) or path.endswith("token_logprobs"):
        for index, (one, other) in enumerate(zip_longest(plain, lane, fillvalue=MISSING)):
            yield from _compare(f"{path}[{index}]", one, other)
    else:
        yield from _leaves(path, plain, lane)


def _leaves(path: str, plain: Any, lane: Any) -> Iterator[Difference]:
    # Types too: 1, 1.0 and true are equal in Python, and not in JSON.
    if plain != lane or type(plain) is not type(lane):
        yield Difference(path, plain, lane)


def _shapes(plain: Mapping[str, list[str]], lane: Mapping[str, list[str]]) -> Iterator[Difference]:
    """Chunks of one kind must look alike; which kinds there are depends on where vLLM happened to cut."""
    for kind in plain.keys() & lane.keys():
        for shape in lane[kind]:
            if shape not in plain[kind]:
                yield Difference(f"shape of the {kind} chunk", plain[kind], shape)


def _alternatives(path: str, plain: Any, lane: Any) -> Iterator[Difference]:
    """Compare the most probable tokens of one position, or of all; tokens of equal probability may trade places."""
    if _per_position(plain) and _per_position(lane):
        for index, (one, other) in enumerate(zip_longest(plain, lane, fillvalue=MISSING)):
            yield from _alternatives(f"{path}[{index}].top_logprobs", one, other)
        return
    one, other = _pairs(plain), _pairs(lane)
    if one is None or other is None or len(one) != len(other):
        yield from _leaves(path, plain, lane)
        return
    for (token, value), (_, said) in zip(one, other, strict=True):
        if abs(value - said) > TOLERANCE:
            yield Difference(f"{path}[{token!r}]", value, said)
    yield from _strangers(path, dict(one), dict(other))


def _strangers(path: str, plain: dict[str, float], lane: dict[str, float]) -> Iterator[Difference]:
    """A token that only one lane lists must be as improbable as the last one the other lists."""
    for mine, yours in ((plain, lane), (lane, plain)):
        for token, value in mine.items():
            near = yours.get(token, min(yours.values()))
            if abs(value - near) > TOLERANCE and value > _UNLIKELY:
                yield Difference(f"{path}[{token!r}]", plain.get(token, MISSING), lane.get(token, MISSING))


def _per_position(value: Any) -> bool:
    return (
        isinstance(value, list) and all(isinstance(entry, Mapping) and "token" not in entry for entry in value) and bool(value)
    )


def _pairs(value: Any) -> list[tuple[str, float]] | None:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list) and all(isinstance(entry, Mapping) for entry in value):
        return [(entry["token"], entry["logprob"]) for entry in value]
    return None


def _short(value: Any, limit: int = 300) -> str:
    text = repr(value)
    return text if len(text) <= limit or (isinstance(value, Sequence) and len(value) < 2) else text[:limit] + "..."
