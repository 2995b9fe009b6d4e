"""What the chunks of a stream share on both endpoints: who answers, usage where it is asked for, the fingerprint, the end."""

from collections.abc import Mapping
from typing import Any

from gateway.answer import AnswerState, PrefillAnswer, encode
from gateway.errors import GatewayError
from gateway.plan import Plan
from gateway.sse import DONE, event


class Chunks:
    """Writes the chunks of one answer around their choices. Members and nulls are vLLM's, in its order."""

    kind = "text_completion"

    def __init__(self, plan: Plan, prefill: PrefillAnswer, state: AnswerState) -> None:
        self._plan = plan
        self._prefill = prefill
        self._state = state
        head = {"id": prefill.id, "object": self.kind, "created": prefill.created, "model": prefill.model}
        self._head = encode(head)[:-1]
        # Where a chunk with usage follows the last token, that one is the last and carries the fingerprint.
        stamped = not plan.form.include_usage and prefill.system_fingerprint is not None
        self._stamp = {"system_fingerprint": prefill.system_fingerprint} if stamped else {}

    def around(self, before: bytes, after: bytes) -> tuple[bytes, bytes]:
        """Return what stands around the text of chunks that differ in nothing else; the choice is around it in turn."""
        return b"data: " + self._head + b',"choices":[' + before, after + b"]}\n\n"

    def chunk(self, choice: bytes, **members: Any) -> bytes:
        """Return the chunk of a choice, which is JSON; `members` are those that stand last."""
        return self._chunk(choice, self._state.tokens, members)

    def usage(self, tokens: int) -> dict[str, Any]:
        """Return usage as far as vLLM tells it while the answer grows."""
        prompt = self._prefill.prompt_tokens
        return {"prompt_tokens": prompt, "total_tokens": prompt + tokens, "completion_tokens": tokens}

    def end(self) -> bytes:
        """Return what follows the last token: usage where it is asked for, and [DONE]."""
        if not self._plan.form.include_usage:
            return DONE
        tail: dict[str, Any] = {
            "choices": [],
            "usage": self._state.usage(self._prefill),
            "system_fingerprint": self._prefill.system_fingerprint,
            "metrics": self._state.metrics(self._prefill),
        }
        return event(self._head + b"," + encode(_without_nulls(tail))[1:]) + DONE

    def fail(self, error: GatewayError) -> bytes:
        """Return an error as an event; no [DONE] follows, so no client takes what it has for a whole answer."""
        return event(error.body())

    def _chunk(self, choice: bytes, tokens: int, members: Mapping[str, Any]) -> bytes:
        usage = {"usage": self.usage(tokens)} if self._plan.form.continuous_usage else {}
        stamp = self._stamp if self._state.finish_reason is not None else {}
        rest = {**usage, **stamp, **members}
        return event(self._head + b',"choices":[' + choice + (b"]," + encode(rest)[1:] if rest else b"]}"))


def _without_nulls(value: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_nulls(member) if isinstance(member, dict) else member
        for key, member in value.items()
        if member is not None
    }
