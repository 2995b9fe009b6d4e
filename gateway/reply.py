"""The client's answer, in the form vLLM itself would have given it: SSE chunks or one JSON object."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway.errors import GatewayError
from gateway.text import Detokenizer


@dataclass(frozen=True, slots=True)
class PrefillAnswer:
    """vLLM's answer to the prefill leg: what the client's answer takes over from it."""

    id: str
    created: int
    model: str
    role: str
    system_fingerprint: str | None
    prompt_tokens: int
    usage: dict[str, Any]
    finished: bool  # the first token ends the answer
    raw: dict[str, Any]


class AnswerState:
    """Text, token count and ending of one answer; both writers share it."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self.tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | None = None

    def feed(self, ids: Sequence[int], finish: str | None) -> str:
        """Add ids, the last of them a stop id if `finish` is "stop"; returns the text to show now."""
        # A stop id is counted and not shown, as in vLLM.
        shown_ids = ids[:-1] if finish == "stop" else ids
        piece = self._detokenizer.feed(shown_ids)
        if piece.stop is not None:
            self.tokens += piece.tokens
            self.finish_reason, self.stop_reason = "stop", piece.stop
            return piece.text
        self.tokens += len(ids)
        if finish is None:
            return piece.text
        self.finish_reason = finish
        return piece.text + self._detokenizer.finish()

    def usage(self, prefill: PrefillAnswer) -> dict[str, Any]:
        """Return usage as vLLM counts it."""
        total = {"total_tokens": prefill.prompt_tokens + self.tokens, "completion_tokens": self.tokens}
        return {**prefill.usage, **total}


class StreamWriter:
    """Server-sent events: a role chunk, a chunk per batch of tokens, usage if asked for, [DONE]."""

    content_type = "text/event-stream; charset=utf-8"

    def __init__(self, prefill: PrefillAnswer, state: AnswerState, *, include_usage: bool) -> None:
        self._prefill = prefill
        self._state = state
        self._include_usage = include_usage
        head = {
            "id": prefill.id,
            "object": "chat.completion.chunk",
            "created": prefill.created,
            "model": prefill.model,
        }
        # Only the text differs from chunk to chunk; encoding the rest anew each time would cost more than the text.
        self._head = _compact(head)[:-1]
        self._before = f'data: {self._head},"choices":[{{"index":0,"delta":{{"content":'
        self._after = '},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'

    def begin(self) -> bytes:
        """Return the role chunk."""
        return (
            f'data: {self._head},"choices":[{{"index":0,"delta":{{"role":{_compact(self._prefill.role)},"content":""}},'
            '"logprobs":null,"finish_reason":null}],"prompt_token_ids":null}\n\n'
        ).encode()

    def write(self, ids: Sequence[int], finish: str | None) -> bytes:
        """Return the chunk for a batch of tokens."""
        text = _compact(self._state.feed(ids, finish))
        if self._state.finish_reason is None:
            return (self._before + text + self._after).encode()
        ending, stop = _compact(self._state.finish_reason), _compact(self._state.stop_reason)
        fingerprint = self._prefill.system_fingerprint
        # Where a usage chunk follows, that one is the last and carries the fingerprint, as in vLLM.
        stamp = "" if fingerprint is None or self._include_usage else f',"system_fingerprint":{_compact(fingerprint)}'
        return (
            f'{self._before}{text}}},"logprobs":null,"finish_reason":{ending},"stop_reason":{stop},"token_ids":null}}]'
            f"{stamp}}}\n\n"
        ).encode()

    def end(self) -> bytes:
        """Return what follows the last chunk."""
        return self._usage_chunk() + b"data: [DONE]\n\n"

    def fail(self, error: GatewayError) -> bytes:
        """Return an error event; no [DONE] follows, so no client takes what it has for a whole answer."""
        return b"data: " + error.body() + b"\n\n"

    def _usage_chunk(self) -> bytes:
        if not self._include_usage:
            return b""
        usage, fingerprint = self._state.usage(self._prefill), self._prefill.system_fingerprint
        tail: dict[str, Any] = {"choices": [], "usage": _without_nulls(usage), "system_fingerprint": fingerprint}
        return f"data: {self._head},{_compact(_without_nulls(tail))[1:]}\n\n".encode()


class JsonWriter:
    """One chat.completion object: vLLM's own answer to the prefill leg, with the whole text in it."""

    content_type = "application/json"

    def __init__(self, prefill: PrefillAnswer, state: AnswerState) -> None:
        self._prefill = prefill
        self._state = state
        self._text: list[str] = []

    def add(self, ids: Sequence[int], finish: str | None) -> None:
        """Take a batch of tokens."""
        self._text.append(self._state.feed(ids, finish))

    def end(self) -> bytes:
        """Return the object."""
        answer = dict(self._prefill.raw)
        choice = dict(answer["choices"][0])
        choice["message"] = {**choice["message"], "content": "".join(self._text)}
        choice["finish_reason"] = self._state.finish_reason
        choice["stop_reason"] = self._state.stop_reason
        answer["choices"] = [choice]
        answer["usage"] = self._state.usage(self._prefill)
        answer["kv_transfer_params"] = None
        return _compact(answer).encode()


def read_prefill_answer(body: bytes) -> PrefillAnswer:
    """Read vLLM's answer to the prefill leg; raises ValueError when it is not a chat completion of one choice."""
    try:
        raw = json.loads(body)
        choice = raw["choices"][0]
        usage = raw["usage"]
        if not isinstance(choice["message"], dict) or len(raw["choices"]) != 1:
            raise ValueError("not one choice with a message")
        if choice["finish_reason"] not in ("stop", "length"):
            raise ValueError(f"prefill ended with finish_reason {choice['finish_reason']!r}")
        return PrefillAnswer(
            id=str(raw["id"]),
            created=int(raw["created"]),
            model=str(raw["model"]),
            role=str(choice["message"]["role"]),
            system_fingerprint=raw.get("system_fingerprint"),
            prompt_tokens=int(usage["prompt_tokens"]),
            usage=usage,
            finished=choice["finish_reason"] == "stop",
            raw=raw,
        )
    except (LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"vLLM's answer is no chat completion: {error!r}") from error


def _without_nulls(value: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_nulls(member) if isinstance(member, dict) else member
        for key, member in value.items()
        if member is not None
    }


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
