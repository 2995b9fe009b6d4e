"""The client's answer, in the form vLLM itself would have given it: SSE chunks or one JSON object.

Writers are made from the prefill leg's answer; tokens follow in batches, in any cut.
"""

from typing import Protocol

from gateway.answer import AnswerState, Delta, PrefillAnswer, read_prefill_answer
from gateway.chat_reply import ChatJson, ChatStream
from gateway.completion_reply import CompletionJson, CompletionStream
from gateway.endpoints import Endpoint
from gateway.errors import GatewayError
from gateway.plan import Plan
from gateway.tokens import Batch

__all__ = [
    "AnswerState",
    "Delta",
    "JsonWriter",
    "PrefillAnswer",
    "StreamWriter",
    "json_writer",
    "read_prefill_answer",
    "stream_writer",
]


class StreamWriter(Protocol):
    """Writes server-sent events, `begin` first; nothing may be written after `end` or `fail`."""

    content_type: str

    def begin(self) -> bytes:
        """Return what precedes the first token."""
        ...

    def write(self, batch: Batch) -> bytes:
        """Return the chunk of a batch of tokens."""
        ...

    def end(self) -> bytes:
        """Return what follows the last token."""
        ...

    def fail(self, error: GatewayError) -> bytes:
        """Return an error event, which ends the stream."""
        ...


class JsonWriter(Protocol):
    """Writes one JSON object."""

    content_type: str

    def add(self, batch: Batch) -> None:
        """Take a batch of tokens."""
        ...

    def end(self) -> bytes:
        """Return the object."""
        ...


def stream_writer(plan: Plan, prefill: PrefillAnswer, state: AnswerState) -> StreamWriter:
    """Return the writer of an answer that streams."""
    kind = ChatStream if plan.endpoint is Endpoint.CHAT else CompletionStream
    return kind(plan, prefill, state)


def json_writer(plan: Plan, prefill: PrefillAnswer, state: AnswerState) -> JsonWriter:
    """Return the writer of an answer that comes whole."""
    kind = ChatJson if plan.endpoint is Endpoint.CHAT else CompletionJson
    return kind(plan, prefill, state)
