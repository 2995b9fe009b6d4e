"""A JSON object's top-level members with the places they stand at, so that a body can be rewritten without touching the rest.

The prompt's own bytes are left as they came: re-serialising changes number forms, key order and escapes, and with them what a
chat template sees.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]  # not in typeshed
from typing import Any

_MAX_MEMBERS = 256  # vLLM knows some sixty fields; counting a million would stall everybody's tokens
_SPACE = re.compile(r"[ \t\n\r]*")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_scan_value = json.JSONDecoder().scan_once  # type: ignore[attr-defined]  # not in typeshed


class NotAnObject(Exception):  # noqa: N818 - a finding, not a fault: vLLM answers it
    """The body is no JSON object."""


@dataclass(frozen=True, slots=True)
class Member:
    """One top-level member. `start` is at its key's quote, `end` after its value."""

    key: str
    value: Any
    start: int
    end: int


class Body:
    """A parsed request body. Where a key stands twice the last one counts, as for vLLM."""

    def __init__(self, raw: bytes) -> None:
        """Raises NotAnObject."""
        try:
            self._text = raw.decode("utf-8")
            self._members = {member.key: member for member in _members(self._text)}
        except (UnicodeDecodeError, ValueError, StopIteration, RecursionError) as error:
            raise NotAnObject(str(error)) from error
        self.raw = raw

    def get(self, key: str) -> Any:
        """Return a member's value; None where it is absent, as for null."""
        member = self._members.get(key)
        return None if member is None else member.value

    def __contains__(self, key: str) -> bool:
        """Whether the member is there, if only as null."""
        return key in self._members

    def items(self) -> Iterator[tuple[str, Any]]:
        """Yield all members, nulls too."""
        for key, member in self._members.items():
            yield key, member.value

    def has_lone_surrogates(self) -> bool:
        """Whether a string anywhere holds half of a pair: only an escape can say so, and UTF-8 cannot."""
        if _SURROGATE.search(self._text) is None:
            return False
        try:
            json.dumps(dict(self.items()), ensure_ascii=False).encode("utf-8")
        except (UnicodeEncodeError, RecursionError):
            return True
        return False

    def with_members(self, keep: Iterable[str], extra: dict[str, Any]) -> bytes:
        """Return an object of the kept members, byte for byte, and the extra ones."""
        kept = [self._text[member.start : member.end] for key in keep if (member := self._members.get(key)) is not None]
        added = [f"{json.dumps(key)}:{json.dumps(value)}" for key, value in extra.items()]
        return ("{" + ",".join([*kept, *added]) + "}").encode("utf-8")


def _members(text: str) -> list[Member]:
    position = _skip(text, 0)
    if text[position : position + 1] != "{":
        raise NotAnObject("the body is no JSON object")
    members: list[Member] = []
    position = _skip(text, position + 1)
    if text[position : position + 1] == "}":
        return _at_end(text, position + 1, members)
    while True:
        start = position
        if text[position : position + 1] != '"':
            raise NotAnObject(f"a member's name is missing at {position}")
        key, position = scanstring(text, position + 1, True)
        position = _skip(text, position)
        if text[position : position + 1] != ":":
            raise NotAnObject(f"a colon is missing at {position}")
        value, end = _scan_value(text, _skip(text, position + 1))
        members.append(Member(key, value, start, end))
        if len(members) > _MAX_MEMBERS:
            raise NotAnObject(f"more than {_MAX_MEMBERS} members")
        position = _skip(text, end)
        separator = text[position : position + 1]
        if separator == "}":
            return _at_end(text, position + 1, members)
        if separator != ",":
            raise NotAnObject(f"a comma is missing at {position}")
        position = _skip(text, position + 1)


def _at_end(text: str, position: int, members: list[Member]) -> list[Member]:
    if _skip(text, position) != len(text):
        raise NotAnObject("there is more after the object")
    return members


def _skip(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return position if match is None else match.end()
