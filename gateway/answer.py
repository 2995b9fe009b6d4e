"""One answer on its way to the client: what vLLM told with the prefill, and what the tokens have added since."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from gateway.cards import Card
from gateway.endpoints import Endpoint
from gateway.logprobs import read_chat_logprobs, read_completion_logprobs
from gateway.plan import Plan
from gateway.text import Detokenizer
from gateway.tokens import Batch, TokenLogprobs

encode = msgspec.json.Encoder().encode
"""JSON as vLLM writes it: no spaces, and characters as they are."""


@dataclass(frozen=True, slots=True)
class PrefillAnswer:
    """vLLM's answer to the prefill leg: what the client's answer takes over from it."""

    id: str
    created: int
    model: str
    role: str  # of the chat's message; "" for a completion
    system_fingerprint: str | None
    prompt_tokens: int
    usage: dict[str, Any]
    finished: bool  # the first token ends the answer
    logprobs: tuple[TokenLogprobs, ...]  # of the first token, where they were asked for
    prompt_token_ids: list[int] | None  # where they were asked for
    prompt_text: str | None
    metrics: dict[str, Any] | None  # vLLM's own times for the request, where it is configured to tell them
    raw: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Delta:
    """What one batch adds to the answer: tokens after a stop string are cut off."""

    text: str
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each id, or none
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class AnswerState:
    """Text, token count and ending of one answer; every writer shares it."""

    def __init__(self, card: Card, plan: Plan, prompt_tail: Sequence[int]) -> None:
        self.tokenizer = card.tokenizer
        self._detokenizer = Detokenizer(card.tokenizer, prompt_tail, plan.form, plan.sampling.min_tokens)
        self._logprobs = plan.sampling.logprobs is not None
        self._eos = None if plan.sampling.ignore_eos else card.eos_token_id
        self._began = self._last = 0.0
        self.tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.reasoning_tokens: int | None = None  # kept by who parses the answer; None where nothing counts them

    def feed(self, batch: Batch) -> Delta:
        """Add a batch; raises ValueError when logprobs are asked for and it has not one for each id."""
        if self._logprobs and len(batch.logprobs) != len(batch.ids):
            raise ValueError(f"{len(batch.logprobs)} logprobs came with {len(batch.ids)} tokens")
        self._last = time.perf_counter()
        self._began = self._began or self._last
        piece = self._detokenizer.feed(batch.ids, stopped=batch.finish == "stop")
        self.tokens += piece.kept
        text = piece.text
        if piece.stop is not None:
            self.finish_reason, self.stop_reason = "stop", piece.stop
        elif batch.finish is not None:
            text += self._detokenizer.finish()
            self.finish_reason = batch.finish
            self.stop_reason = self._reason(batch.ids) if batch.finish == "stop" else None
        logprobs = batch.logprobs[: piece.kept] if self._logprobs else ()
        return Delta(text, batch.ids[: piece.kept], logprobs, self.finish_reason, self.stop_reason)

    def usage(self, prefill: PrefillAnswer) -> dict[str, Any]:
        """Return usage as vLLM counts it."""
        total = {"total_tokens": prefill.prompt_tokens + self.tokens, "completion_tokens": self.tokens}
        return {**prefill.usage, **total, **({} if self.reasoning_tokens is None else self.reasoning_usage())}

    def reasoning_usage(self) -> dict[str, Any]:
        """Return the member of usage that counts tokens of reasoning: null where vLLM parses none."""
        count = self.reasoning_tokens
        return {"completion_tokens_details": None if count is None else {"reasoning_tokens": count}}

    def metrics(self, prefill: PrefillAnswer) -> dict[str, Any] | None:
        """Return the request's times in vLLM's form: queue and first token as vLLM took them, the rest as they passed here."""
        if prefill.metrics is None:
            return None
        took_ms = (self._last - self._began) * 1000
        first_ms = prefill.metrics.get("time_to_first_token_ms")
        all_ms = took_ms + first_ms if isinstance(first_ms, int | float) else 0.0
        return {
            **prefill.metrics,
            "generation_time_ms": took_ms,
            "mean_itl_ms": took_ms / (self.tokens - 1) if self.tokens > 1 else None,
            "tokens_per_second": self.tokens / all_ms * 1000 if all_ms > 0 else None,
        }

    def _reason(self, ids: Sequence[int]) -> int | None:
        # vLLM names a stop id unless it is the tokenizer's own end (v1/core/sched/utils.py, check_stop).
        return None if not ids or ids[-1] == self._eos else ids[-1]


def whole_answer(prefill: PrefillAnswer, state: AnswerState, choice: dict[str, Any], **members: Any) -> bytes:
    """Return an answer that does not stream: the prefill leg's own, with this choice, usage, and `members` exchanged."""
    exchanged = {"choices": [choice], "usage": state.usage(prefill), "kv_transfer_params": None, **members}
    if prefill.metrics is not None:
        exchanged["metrics"] = state.metrics(prefill)
    return encode(prefill.raw | exchanged)


# --- vLLM's answer to the prefill leg ---


class _Usage(msgspec.Struct):
    prompt_tokens: Annotated[int, msgspec.Meta(ge=0)]


class _Message(msgspec.Struct):
    role: str


class _Choice(msgspec.Struct):
    finish_reason: Literal["stop", "length"]  # anything else is no single token
    message: _Message | None = None
    text: str | None = None
    logprobs: Any = None
    prompt_token_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=2**32)]] | None = None


class _Answer(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1, max_length=1)]
    usage: _Usage
    system_fingerprint: str | None = None
    prompt_token_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=2**32)]] | None = None
    prompt_text: str | None = None
    metrics: dict[str, Any] | None = None


def read_prefill_answer(endpoint: Endpoint, body: bytes) -> PrefillAnswer:
    """Read vLLM's answer to the prefill leg; raises ValueError when it is not one choice with one token."""
    try:
        raw = msgspec.json.decode(body)
        answer = msgspec.convert(raw, _Answer)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ValueError(f"vLLM's answer is not one of {endpoint}: {error!r}") from error
    (choice,) = answer.choices
    chat = endpoint is Endpoint.CHAT
    if (choice.message if chat else choice.text) is None:
        raise ValueError(f"vLLM's answer is not one of {endpoint}: its choice has no {'message' if chat else 'text'}")
    read = read_chat_logprobs if chat else read_completion_logprobs
    logprobs = () if choice.logprobs is None else read(choice.logprobs)
    if choice.logprobs is not None and len(logprobs) != 1:
        raise ValueError(f"vLLM's answer tells logprobs of {len(logprobs)} tokens: the prefill leg makes one")
    return PrefillAnswer(
        id=answer.id,
        created=answer.created,
        model=answer.model,
        role=choice.message.role if choice.message is not None else "",
        system_fingerprint=answer.system_fingerprint,
        prompt_tokens=answer.usage.prompt_tokens,
        usage=raw["usage"],
        finished=choice.finish_reason == "stop",
        logprobs=logprobs,
        prompt_token_ids=answer.prompt_token_ids if chat else choice.prompt_token_ids,
        prompt_text=answer.prompt_text,
        metrics=answer.metrics,
        raw=raw,
    )
