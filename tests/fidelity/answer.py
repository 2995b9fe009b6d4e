"""Reads an HTTP answer into plain values that can be compared: JSON as it is, a stream as the events a client sees."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

_COMPLETION_LOGPROBS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. `faults` says what is wrong with a stream's structure, whatever the other lane says."""

    status: int
    headers: Mapping[str, str]
    raw: bytes
    value: Any  # parsed JSON, a stream's events, or None where it is neither
    faults: tuple[str, ...] = ()

    @property
    def lane(self) -> str:
        """The lane that served it; empty where nobody asked for one."""
        return self.headers.get("x-slo-lane", "")

    @property
    def reason(self) -> str:
        """Why that lane did."""
        return self.headers.get("x-slo-reason", "")


def read(response: httpx.Response) -> Answer:
    """Read an answer."""
    raw, headers = response.content, dict(response.headers)
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        stream = Stream()
        for event in raw.decode().split("\n\n"):
            stream.take(event)
        return Answer(response.status_code, headers, raw, stream.events(), tuple(stream.faults))
    try:
        return Answer(response.status_code, headers, raw, json.loads(raw))
    except ValueError:
        return Answer(response.status_code, headers, raw, None)


@dataclass(slots=True)
class Choice:
    """What the chunks of one choice bring, joined."""

    faults: list[str]
    role: str | None = None
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tools: dict[int, dict[str, Any]] = field(default_factory=dict)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[list[int] | None] = field(default_factory=list)
    ending: dict[str, Any] | None = None

    def take(self, choice: dict[str, Any]) -> str:
        """Take a chunk's choice; returns which kind of chunk it is."""
        if self.ending is not None:
            self.faults.append("a choice after its end")
        delta = choice.get("delta") or {}
        if "role" in delta:
            if self.role is not None or self.token_ids:
                self.faults.append("a role that is not the first chunk's")
            self.role = delta["role"]
            return "opening"
        self.text.append(choice["text"] if "text" in choice else delta.get("content") or "")
        self.reasoning.append(delta.get("reasoning") or "")
        for call in delta.get("tool_calls") or ():
            self._take_tool_call(call)
        if choice["logprobs"] is not None:
            self.logprobs.append(choice["logprobs"])
        self.token_ids.append(choice.get("token_ids"))
        if choice["finish_reason"] is None:
            return "middle"
        self.ending = {key: choice.get(key, "(not there)") for key in ("finish_reason", "stop_reason")}
        return "end"

    def events(self) -> dict[str, Any]:
        """Return what a client has of this choice at the end."""
        if self.ending is None:
            self.faults.append("no finish_reason")
        self._check_offsets()
        return {
            "role": self.role,
            "text": "".join(self.text),
            "reasoning": "".join(self.reasoning),
            "tool_calls": [self.tools[index] for index in sorted(self.tools)],
            "logprobs": self._joined_logprobs(),
            "token_ids": [i for ids in self.token_ids for i in ids or ()],
            **(self.ending or {}),
        }

    def _take_tool_call(self, call: dict[str, Any]) -> None:
        whole = self.tools.setdefault(call["index"], {"arguments": ""})
        function = call.get("function") or {}
        for key, value in (("id", call.get("id")), ("type", call.get("type")), ("name", function.get("name"))):
            if value is not None:
                if key in whole:
                    self.faults.append(f"tool call {call['index']} has its {key} twice")
                whole[key] = value
        whole["arguments"] += function.get("arguments") or ""

    def _joined_logprobs(self) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        keys = ("content",) if "content" in self.logprobs[0] else _COMPLETION_LOGPROBS
        return {key: [entry for part in self.logprobs for entry in part[key]] for key in keys}

    def _check_offsets(self) -> None:
        logprobs = self._joined_logprobs() or {}
        offset = 0
        for token, said in zip(logprobs.get("tokens", ()), logprobs.get("text_offset", ()), strict=True):
            if said != offset:
                self.faults.append(f"text_offset {said} where {offset} characters of tokens went before")
            offset = said + len(token)


@dataclass(slots=True)
class Stream:
    """Takes a stream's chunks one by one: joins what a client joins, and notes what no chunk may do."""

    faults: list[str] = field(default_factory=list)
    _head: dict[str, Any] = field(default_factory=dict)
    _choices: dict[int, Choice] = field(default_factory=dict)
    _prompt_token_ids: dict[int, list[int]] = field(default_factory=dict)
    _more: dict[str, Any] = field(default_factory=dict)
    _running_usage: list[dict[str, Any] | None] = field(default_factory=list)
    _usage: dict[str, Any] | None = None
    _error: Any = None
    _done: bool = False
    _shapes: dict[str, list[str]] = field(default_factory=dict)

    def take(self, event: str) -> None:
        """Take one event, without the blank line after it."""
        if not event:
            return
        if self._done:
            self.faults.append(f"after [DONE]: {event!r}")
        if not event.startswith("data: ") or "\n" in event:
            self.faults.append(f"not one data line: {event!r}")
            return
        data = event.removeprefix("data: ")
        if data == "[DONE]":
            self._done = True
        elif "error" in (chunk := json.loads(data)):
            self._error = chunk["error"]
        else:
            self._take_chunk(chunk)

    def events(self) -> dict[str, Any]:
        """Return what a client has at the end."""
        choices = [self._choices[index].events() for index in sorted(self._choices)]
        self._check_end()
        return {
            **self._head,
            "choices": choices,
            "prompt_token_ids": [self._prompt_token_ids[index] for index in sorted(self._prompt_token_ids)],
            "running_usage": self._running_usage[-1] if self._running_usage else None,
            "usage": self._usage,
            "more": self._more,
            "error": self._error,
            "done": self._done,
            "shapes": self._shapes,
        }

    def _take_chunk(self, chunk: dict[str, Any]) -> None:
        head = {key: chunk.get(key) for key in ("id", "object", "created", "model")}
        if self._head and head != self._head:
            self.faults.append(f"id, object, created or model changes: {head} after {self._head}")
        self._head = self._head or head
        if self._usage is not None:
            self.faults.append("a chunk after the one of usage")
        kind = self._take_choice(chunk) if chunk["choices"] else self._take_usage(chunk)
        for key in chunk.keys() - head.keys() - {"choices", "usage", "prompt_token_ids"}:
            self._more.setdefault(f"{key} of the {kind} chunk", chunk[key])
        shape = shape_of(chunk)
        if shape not in self._shapes.setdefault(kind, []):
            self._shapes[kind].append(shape)

    def _take_choice(self, chunk: dict[str, Any]) -> str:
        [choice] = chunk["choices"]
        index = choice["index"]
        self._running_usage.append(chunk.get("usage"))
        for holder in (chunk, choice):
            if holder.get("prompt_token_ids") is not None:
                if index in self._choices and self._choices[index].token_ids:
                    self.faults.append("prompt_token_ids in a later chunk")
                self._prompt_token_ids[index] = holder["prompt_token_ids"]
                holder["prompt_token_ids"] = None  # the shape of later chunks, which have null there
        return self._choices.setdefault(index, Choice(self.faults)).take(choice)

    def _take_usage(self, chunk: dict[str, Any]) -> str:
        self._usage = chunk["usage"]
        return "usage"

    def _check_end(self) -> None:
        if self._error is None and not self._done:
            self.faults.append("no [DONE]")
        counted = [usage["completion_tokens"] for usage in self._running_usage if usage is not None]
        if counted and len(self._choices) == 1:
            if len(counted) != len(self._running_usage) or counted != sorted(counted):
                self.faults.append(f"continuous usage counts {counted} in {len(self._running_usage)} chunks")
            if self._usage is not None and self._usage["completion_tokens"] != counted[-1]:
                self.faults.append("continuous usage ends at another number than usage")


def shape_of(value: Any) -> str:
    """Return the names and kinds of a JSON value, compactly: what is there, what is null, and in which order.

    What logprobs hold is compared entry by entry elsewhere: tokens are names there.
    """
    if isinstance(value, Mapping):
        members = (
            f"{key}: {_names(member) if key == 'logprobs' and member else shape_of(member)}" for key, member in value.items()
        )
        return "{" + ", ".join(members) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{shape_of(value[0])}]" if value and isinstance(value[0], Mapping) else "list"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int | float):
        return "number"
    return "null" if value is None else "str"


def _names(logprobs: Mapping[str, Any]) -> str:
    return "{" + ", ".join(logprobs) + "}"
