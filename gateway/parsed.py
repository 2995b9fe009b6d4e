"""Chat answers whose message vLLM's own parsers make: tool calls and reasoning, as vLLM tells them.

The parsers are slower than the decode: one call is in flight, and what arrives meanwhile goes with the next. So the decode
never waits for them, and a client gets fewer, longer chunks.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any

from gateway.answer import AnswerState, Delta, PrefillAnswer, encode, whole_answer
from gateway.chat_reply import ChatChoices, ChatChunks
from gateway.errors import UpstreamFailed
from gateway.plan import Plan
from gateway.reasoning import ReasoningTokens
from gateway.rendering import Derenderer, Parsing, ToolChoice
from gateway.sse import EVENT_STREAM
from gateway.tokens import Batch, TokenLogprobs
from gateway.upstream import UpstreamUnavailable

_AT_ONCE = 8
"""Tokens for one call of the parsers at most: vLLM's llama3_json loses a tool call's name when it sees some thirty at once."""


@dataclass(frozen=True, slots=True)
class Parts:
    """One answer: who asked for what, what vLLM told with the prefill, and who parses."""

    plan: Plan
    prefill: PrefillAnswer
    state: AnswerState
    parsing: Parsing
    derenderer: Derenderer
    reasoning: ReasoningTokens | None = None  # counts them where vLLM has a reasoning parser

    def told(self) -> Plan:
        """Return the plan of what is told beside the message: where the reasoning is hidden, nothing of single tokens."""
        if not self.parsing.hidden:
            return self.plan
        form, sampling = self.plan.form, self.plan.sampling
        return replace(self.plan, form=replace(form, return_token_ids=False), sampling=replace(sampling, logprobs=None))

    def count(self, ids: Sequence[int]) -> None:
        """Count the tokens of reasoning among the answer's next ones."""
        if self.reasoning is not None:
            self.state.reasoning_tokens = self.reasoning.add(ids)

    def text_ids(self, ids: Sequence[int], finish: str | None) -> list[int]:
        """Return the ids whose text vLLM would parse: not a stop id, unless it is to be included."""
        shown = ids[:-1] if finish == "stop" and not self.plan.form.include_stop else ids
        return [token for token in shown if token not in self.parsing.unseen]


class ParsedStream:
    """Server-sent events: a chunk with the role, one for each call of the parsers that adds something, usage, [DONE]."""

    content_type = EVENT_STREAM

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._chunks = ChatChunks(parts.plan, parts.prefill, parts.state)
        told = parts.told()
        self._choices = ChatChoices(told, parts.state)
        self._tells = told.form.return_token_ids or told.sampling.logprobs is not None
        self._called = False
        self.error: Exception | None = None  # what broke the stream off

    async def chunks(self, batches: AsyncIterator[Batch]) -> AsyncGenerator[bytes, None]:
        """Yield the answer to these tokens, the first one first. Where it breaks off, an error is its last event."""
        self._parts.count(())
        state = self._parts.state
        yield self._chunks.role()
        try:
            async with aclosing(_Gathered(batches, self._parts.parsing.markers)) as gathered:
                while state.finish_reason is None:
                    piece = await gathered.next()
                    message = await self._parse(piece)
                    chunk = self._chunk(message, state.feed(piece))
                    if chunk is not None:
                        yield chunk
        except (UpstreamUnavailable, ValueError) as error:
            self.error = error
            yield self._chunks.fail(_lost(error))
            return
        yield self._chunks.end()

    async def _parse(self, piece: Batch) -> dict[str, Any]:
        ids = self._parts.text_ids(piece.ids, piece.finish)
        if not ids and piece.finish is None:
            return {}
        message = await self._parts.derenderer.delta(ids, piece.finish)
        return _with_null_reasoning(message) if message and self._parts.parsing.hidden else message

    def _chunk(self, message: dict[str, Any], delta: Delta) -> bytes | None:
        """Return the chunk of one call; None where vLLM sends none: the parser holds the tokens back."""
        self._called = self._called or bool(message.get("tool_calls"))
        self._parts.count(delta.ids)
        if not message and delta.finish_reason is None and not self._tells:
            return None
        if self._called and delta.finish_reason == "stop" and self._parts.parsing.choice is not ToolChoice.NAMED:
            delta = replace(delta, finish_reason="tool_calls")
        return self._chunks.chunk(self._choices.choice(encode(message), delta))


async def parsed_whole(parts: Parts, batches: AsyncIterator[Batch]) -> bytes:
    """Return the whole answer to these tokens as one object; raises UpstreamUnavailable, or ValueError as AnswerState does."""
    state, told = parts.state, parts.told()
    choices = ChatChoices(told, state)
    ids: list[int] = []
    content: list[dict[str, Any]] = []
    async for batch in batches:
        delta = state.feed(batch)
        ids += delta.ids
        content += (choices.logprobs(delta) or {}).get("content", ())
        if state.finish_reason is not None:
            break
    if state.finish_reason is None:
        raise UpstreamUnavailable("the answer's tokens ended without a finish")
    parts.count(ids)
    message, called = await _message(parts, ids, state.finish_reason)
    choice = {
        **parts.prefill.raw["choices"][0],
        "message": message,
        "logprobs": None if told.sampling.logprobs is None else {"content": content},
        "finish_reason": "tool_calls" if called else state.finish_reason,
        "stop_reason": state.stop_reason,
        "token_ids": ids if told.form.return_token_ids else None,
    }
    prompt_ids = parts.prefill.prompt_token_ids if parts.plan.form.return_token_ids else None
    return whole_answer(parts.prefill, state, choice, prompt_token_ids=prompt_ids)


async def _message(parts: Parts, ids: Sequence[int], finish: str) -> tuple[dict[str, Any], bool]:
    """Return the message, and whether its finish_reason is "tool_calls" (vLLM's rules in chat_completion_full_generator)."""
    texts, choice, prefill = parts.text_ids(ids, finish), parts.parsing.choice, parts.prefill
    if len(ids) == 1 or not texts:
        # vLLM's parsers have seen this text already: it is the prefill leg's.
        message = prefill.raw["choices"][0]["message"]
    else:
        message = {**await parts.derenderer.message(texts, finish), "role": prefill.role}
        calls = message.pop("tool_calls", None)
        if calls and choice is not ToolChoice.NONE:
            message = await _with_calls(parts, message, calls, texts, finish)
    called = bool(message.get("tool_calls"))
    return message, (choice is ToolChoice.AUTO and called) or (choice is ToolChoice.REQUIRED and finish == "stop")


async def _with_calls(
    parts: Parts, message: dict[str, Any], calls: list[dict[str, Any]], texts: Sequence[int], finish: str
) -> dict[str, Any]:
    """Return the message with its tool calls, in the place that vLLM gives them.

    The endpoint drops the ids that a parser chooses; when asked for a stream it keeps them.
    """
    told: dict[int, str] = {}
    with suppress(UpstreamUnavailable):  # any id will do
        streamed = await parts.derenderer.delta(texts, finish)
        told = {call["index"]: call["id"] for call in streamed.get("tool_calls", ()) if call.keys() >= {"index", "id"}}
    calls = [{**call, "id": told.get(index) or f"chatcmpl-tool-{secrets.token_hex(8)}"} for index, call in enumerate(calls)]
    reasoning = message.pop("reasoning", None)
    return {**message, "tool_calls": calls[:1] if parts.parsing.one_call else calls, "reasoning": reasoning}


class _Gathered:
    """Takes tokens as fast as they come, and keeps those that wait to be parsed. To be closed."""

    def __init__(self, batches: AsyncIterator[Batch], markers: frozenset[int]) -> None:
        self._markers = markers
        self._waiting: list[tuple[int, tuple[TokenLogprobs, ...]]] = []
        self._finish: str | None = None
        self._news = asyncio.Event()
        self._reading = asyncio.create_task(self._read(batches))

    async def aclose(self) -> None:
        """Take no more."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def next(self) -> Batch:
        """Return the tokens for the next call, once there are any; raises what broke the tokens off.

        Parsers are made for one token at a time: a marker goes alone, since some read it only so, and so does the last token,
        with which they flush what they hold back.
        """
        while True:
            size = self._size()
            if size or (self._finish is not None and not self._waiting):
                return self._take(size)
            if self._reading.done():
                await self._reading
                raise UpstreamUnavailable("the answer's tokens ended without a finish")
            self._news.clear()
            await self._news.wait()

    async def _read(self, batches: AsyncIterator[Batch]) -> None:
        try:
            async for batch in batches:
                told: list[tuple[TokenLogprobs, ...]] = [(logprob,) for logprob in batch.logprobs] or [()] * len(batch.ids)
                self._waiting += zip(batch.ids, told, strict=True)
                self._finish = batch.finish
                self._news.set()
                if batch.finish is not None:
                    return
        finally:
            self._news.set()

    def _size(self) -> int:
        size = len(self._waiting)
        if self._finish is not None and size > 1:
            size -= 1
        size = min(size, _AT_ONCE)
        before = next((place for place, (token, _) in enumerate(self._waiting[:size]) if token in self._markers), size)
        return before or min(size, 1)

    def _take(self, size: int) -> Batch:
        taken, self._waiting = self._waiting[:size], self._waiting[size:]
        finish = None if self._waiting else self._finish
        return Batch(tuple(token for token, _ in taken), finish, tuple(lp for _, told in taken for lp in told))


def _with_null_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return a delta as vLLM streams it where the reasoning is hidden: null of it, in its place among the members."""
    before = {key: value for key, value in message.items() if key in ("role", "content")}
    return {**before, "reasoning": None, **{key: value for key, value in message.items() if key not in before}}


def _lost(error: Exception) -> UpstreamFailed:
    return UpstreamFailed(f"the answer broke off and could not be continued: {error}", code="decode_lost")
