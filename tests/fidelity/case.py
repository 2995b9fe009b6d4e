"""A case: one request, and which lane is to serve it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

MODEL = "smollm2"
CAPITAL = "What is the capital of France?"
COLOURS = "Name three colours of the rainbow."
STORY = "Once upon a time, there was a"

Fields = Mapping[str, Any]
Streaming = Literal["no", "yes", "both", "alternate"]


class Path(StrEnum):
    """The paths that the lane serves."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Case:
    """One request that goes down both lanes.

    `reason` is None where the lane serves the request, else the `x-slo-reason` with which plain vLLM does. A request for which
    vLLM has an error goes either way. `param` names the field that a client which forbids plain vLLM is told.
    Where `sampled`, the two lanes draw from their own random numbers, and all but the drawn tokens is compared.
    `again`: other cases try the same, on the other endpoint, in the other form, or together with something else (pairwise.py).
    """

    name: str
    path: str
    body: Fields | bytes
    reason: str | None = None
    param: str | None = None
    sampled: bool = False
    error: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)
    again: bool = False
    lane_headers: Mapping[str, str] = field(default_factory=dict)  # in place of those with which the lane is asked

    @property
    def fields(self) -> dict[str, Any]:
        """The body's fields; none where the body is no JSON object."""
        return {} if isinstance(self.body, bytes) else dict(self.body)

    def __str__(self) -> str:
        return self.name


def chat(name: str, *, question: str = CAPITAL, **fields: Any) -> Case:
    """Return a greedy chat completion; `fields` overrule what is usual."""
    messages = [{"role": "user", "content": question}]
    return _case(name, Path.CHAT, {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 10, **fields})


def text(name: str, *, prompt: Any = STORY, **fields: Any) -> Case:
    """Return a greedy completion; `fields` overrule what is usual."""
    return _case(name, Path.COMPLETIONS, {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 8, **fields})


def spread(
    table: Mapping[str, Fields],
    *,
    streaming: Streaming = "alternate",
    paths: tuple[Path, ...] = tuple(Path),
    each_is_new: bool = False,
) -> list[Case]:
    """Return one case per entry and path, streaming or not; `alternate` takes turns, and never the same on both paths.

    Of an entry's cases one is new, another one from entry to entry, and the others say it again; or `each_is_new`. None is of
    an entry that says itself that it is `again`.
    """
    cases = []
    for row, (name, fields) in enumerate(table.items()):
        entry = [
            (chat if path is Path.CHAT else text)(f"{'chat' if path is Path.CHAT else 'text'}: {name}", **{**stream, **fields})
            for column, path in enumerate(paths)
            for stream in _streams(streaming, row + column)
        ]
        new = (row // 2 if streaming == "alternate" else row) % len(entry)
        cases += [replace(case, again=case.again or (not each_is_new and index != new)) for index, case in enumerate(entry)]
    return cases


def brief(table: Mapping[str, Fields], tokens: int = 3) -> dict[str, Fields]:
    """Return the same entries for short answers, unless they say how long theirs are: what they try shows at once, or never."""
    return {name: {"max_tokens": tokens, **fields} for name, fields in table.items()}


def _streams(streaming: Streaming, turn: int) -> Iterator[dict[str, bool]]:
    if streaming in ("no", "both") or (streaming == "alternate" and turn % 2 == 0):
        yield {}
    if streaming in ("yes", "both") or (streaming == "alternate" and turn % 2 == 1):
        yield {"stream": True}


_OPTIONS = ("reason", "param", "sampled", "error", "headers", "lane_headers", "again")


def _case(name: str, path: Path, fields: dict[str, Any]) -> Case:
    options = {key: fields.pop(key) for key in _OPTIONS if key in fields}
    body = {key: value for key, value in fields.items() if value is not ABSENT}
    return Case(name + (", streaming" if body.get("stream") is True else ""), path, body, **options)


ABSENT: Any = object()
"""In a table: this field is not in the body."""
