"""The lane's answer phase: token 1 from vLLM's answer, the rest from the daemon, and from vLLM again if the daemon fails."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import structlog

from gateway.decode_client import DecodeFailed
from gateway.errors import UpstreamFailed
from gateway.lane import LaneParts, Prefill
from gateway.reply import AnswerState, JsonWriter, PrefillAnswer, StreamWriter, read_prefill_answer
from gateway.text import Detokenizer
from gateway.tokens import Batch
from gateway.upstream import Replayed, UpstreamUnavailable, read_token_ids
from handoff import decode_pb2 as pb
from handoff.claim import CLAIM_KEY

log = structlog.get_logger(__name__)

_FINISH = {pb.Tokens.NONE: None, pb.Tokens.STOP: "stop", pb.Tokens.LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class Answer:
    """What the client gets: a status, headers, and a body that comes in chunks (to be closed when not read to its end)."""

    status: int
    headers: dict[str, str]
    chunks: AsyncGenerator[bytes, None]


@dataclass(slots=True)
class _Progress:
    """What has been generated so far, by whom: enough for another engine to go on."""

    prompt: list[int] | None = None
    prompt_tail: list[int] = field(default_factory=list)  # its last ids, told with vLLM's answer
    ids: list[int] = field(default_factory=list)
    last: float = 0.0  # perf_counter of the newest batch


class Relay:
    """One request's answer. `outcome` tells, once the chunks have ended, how it went."""

    def __init__(self, parts: LaneParts, prefill: Prefill) -> None:
        self._parts = parts
        self._prefill = prefill
        self._progress = _Progress()
        self._resumed = False
        self._replayed: Replayed | None = None
        self.outcome = "cancelled"

    async def aclose(self) -> None:
        """Free the slot and the connection to vLLM, whatever has happened. Idempotent."""
        self._free()
        if self._replayed is not None:
            await self._replayed.aclose()

    def accepts(self, status: str) -> bool:
        """Tell whether vLLM's answer is to be turned into the client's; one of another status is the client's as it came."""
        if status == "200":
            return True
        self._free()
        self.outcome = "vllm_error"
        return False

    async def answer(self, body: bytes) -> Answer:
        """Turn vLLM's answer (status 200) to the prefill leg into the client's.

        Everything that can fail before the first byte fails here, with a status. Raises UpstreamFailed.
        """
        self._prefill.stages.mark("prefill")
        try:
            prefill = read_prefill_answer(body)
            first, tail = _handed_over(prefill)
        except ValueError as error:
            log.warning("prefill leg without a handoff; vLLM serves the request", error=str(error))
            return await self._replay()
        plan, card = self._prefill.plan, self._prefill.card
        self._progress.prompt_tail = tail
        state = AnswerState(Detokenizer(card.tokenizer, tail, plan.form.stop))
        headers = {"server-timing": self._prefill.stages.header()}
        if plan.form.stream:
            writer = StreamWriter(prefill, state, include_usage=plan.form.include_usage)
            return Answer(200, headers | {"content-type": writer.content_type}, self._stream(writer, state, prefill, first))
        whole = await self._whole(JsonWriter(prefill, state), state, prefill, first)
        headers |= {"content-type": JsonWriter.content_type, "content-length": str(len(whole))}
        return Answer(200, headers, _once(whole))

    def _free(self) -> None:
        self._prefill.stream.cancel()

    async def _stream(
        self, writer: StreamWriter, state: AnswerState, prefill: PrefillAnswer, first: int
    ) -> AsyncGenerator[bytes, None]:
        head = writer.begin()
        try:
            async with aclosing(self._batches(prefill, first)) as batches:
                async for batch in batches:
                    yield head + writer.write(batch.ids, batch.finish)
                    head = b""
                    if state.finish_reason is not None:
                        break
        except UpstreamUnavailable as error:
            self.outcome = "failed"
            yield writer.fail(_lost(error))
            return
        finally:
            self._free()
        self._ended()
        yield writer.end()

    async def _whole(self, writer: JsonWriter, state: AnswerState, prefill: PrefillAnswer, first: int) -> bytes:
        try:
            async with aclosing(self._batches(prefill, first)) as batches:
                async for batch in batches:
                    writer.add(batch.ids, batch.finish)
                    if state.finish_reason is not None:
                        break
        except UpstreamUnavailable as error:
            self.outcome = "failed"
            raise _lost(error) from error
        finally:
            self._free()
        self._ended()
        return writer.end()

    def _ended(self) -> None:
        self.outcome = "resumed" if self._resumed else "completed"

    async def _replay(self) -> Answer:
        """Let vLLM serve the original request: nothing of it has been answered yet. Raises UpstreamFailed."""
        self._free()
        self._parts.metrics.resumed.labels("no_handoff").inc()
        self._resumed = True
        try:
            self._replayed = await self._parts.upstream.replay(self._prefill.original, self._prefill.credentials)
        except UpstreamUnavailable as error:
            self.outcome = "failed"
            raise _lost(error) from error
        headers = {"server-timing": self._prefill.stages.header(), "content-type": self._replayed.content_type}
        return Answer(self._replayed.status, headers, self._pass(self._replayed))

    async def _pass(self, replayed: Replayed) -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(replayed.chunks()) as chunks:
                async for chunk in chunks:
                    yield chunk
        except UpstreamUnavailable:
            # In the middle of bytes that are not the gateway's own: only a broken transfer tells the client.
            self.outcome = "failed"
            raise
        self._ended()
        if replayed.status != 200:
            self.outcome = "vllm_error"

    async def _batches(self, prefill: PrefillAnswer, first: int) -> AsyncGenerator[Batch, None]:
        """Yield every token of the answer exactly once, whoever decodes it."""
        metrics, progress = self._parts.metrics, self._progress
        limit = self._limit(prefill)
        finish = "stop" if prefill.finished else "length" if limit == 1 else None
        metrics.ttft_seconds.observe(time.perf_counter() - self._prefill.stages.began)
        progress.ids.append(first)
        progress.last = time.perf_counter()
        metrics.tokens.inc()
        yield Batch((first,), finish)
        if finish is None:
            async with aclosing(self._rest(prefill, limit)) as rest:
                async for batch in rest:
                    progress.ids.extend(batch.ids)
                    metrics.tokens.inc(len(batch.ids))
                    yield batch

    async def _rest(self, prefill: PrefillAnswer, limit: int) -> AsyncGenerator[Batch, None]:
        try:
            async with aclosing(self._decoded(prefill)) as decoded:
                async for batch in decoded:
                    yield batch
                    if batch.finish is not None:
                        return
        except DecodeFailed as error:
            log.warning("decode leg failed; vLLM goes on", code=error.code, error=str(error), tokens=len(self._progress.ids))
            self._parts.metrics.resumed.labels(error.code).inc()
            self._resumed = True
            self._free()
        done = list(self._progress.ids)
        if len(done) >= limit:
            yield Batch((), "length")
            return
        prompt = await self._prompt(prefill)
        resumed = self._parts.upstream.resume(self._prefill.plan, prompt, done, limit - len(done), self._prefill.credentials)
        async with aclosing(resumed):
            async for batch in resumed:
                self._progress.last = time.perf_counter()
                yield batch

    async def _decoded(self, prefill: PrefillAnswer) -> AsyncGenerator[Batch, None]:
        """Yield the daemon's tokens; raises DecodeFailed."""
        stream, settings, progress = self._prefill.stream, self._parts.settings, self._progress
        event = await stream.read(settings.landing_timeout_s)
        if event.WhichOneof("event") != "landed" or event.landed.first_token != progress.ids[0]:
            raise DecodeFailed("protocol", f"daemon {stream.endpoint} did not land what vLLM sent")
        if len(event.landed.prompt_token_ids) != prefill.prompt_tokens:
            raise DecodeFailed("protocol", f"daemon {stream.endpoint} landed a prompt of another length than vLLM's")
        progress.prompt = list(event.landed.prompt_token_ids)
        self._parts.metrics.stage_seconds.labels("handoff").observe(time.perf_counter() - progress.last)
        position, limit = 1, self._limit(prefill)
        while True:
            # Token 2 waits for the engine's turn: vLLM, with the prompt in its cache, is better than a long queue.
            event = await stream.read(settings.queue_timeout_s if position == 1 else settings.stall_timeout_s)
            if event.WhichOneof("event") != "tokens" or event.tokens.position != position:
                raise DecodeFailed("protocol", f"daemon {stream.endpoint} sent token {event.tokens.position}, not {position}")
            if event.tokens.finish not in _FINISH or not (event.tokens.ids or event.tokens.finish):
                raise DecodeFailed("protocol", f"daemon {stream.endpoint} sent neither tokens nor a known finish")
            batch = Batch(tuple(event.tokens.ids), _FINISH[event.tokens.finish])
            if not self._plausible(batch):
                raise DecodeFailed("protocol", f"daemon {stream.endpoint} sent an unknown token, or a stop where none is")
            if position + len(batch.ids) > limit:
                raise DecodeFailed("protocol", f"daemon {stream.endpoint} sent more than {limit} tokens")
            position += len(batch.ids)
            self._arrived()
            yield batch
            if batch.finish is not None:
                return

    def _plausible(self, batch: Batch) -> bool:
        """Whether a batch is one that this model can end, or go on, with."""
        card, stops = self._prefill.card, set(self._prefill.card.stop_token_ids)
        if any(token >= card.vocab_size for token in batch.ids):
            return False
        if self._prefill.plan.sampling.ignore_eos:
            return batch.finish != "stop"
        before, last = batch.ids[:-1], batch.ids[-1:]
        if batch.finish == "stop":
            return bool(last) and last[0] in stops and not stops.intersection(before)
        return not stops.intersection(batch.ids)

    def _arrived(self) -> None:
        now = time.perf_counter()
        second = len(self._progress.ids) == 1
        histogram = self._parts.metrics.stage_seconds.labels("gap") if second else self._parts.metrics.inter_token_seconds
        histogram.observe(now - self._progress.last)
        self._progress.last = now

    def _limit(self, prefill: PrefillAnswer) -> int:
        """Output tokens in all: what the client asked for, within the context."""
        room = max(1, self._prefill.card.context_tokens - prefill.prompt_tokens)
        return min(self._prefill.plan.max_tokens or room, room)

    async def _prompt(self, prefill: PrefillAnswer) -> list[int]:
        """Return the prompt's ids: the daemon's where it got them, else vLLM's."""
        prompt, tail = self._progress.prompt, self._progress.prompt_tail
        if prompt is None:
            prompt = await self._parts.upstream.prompt_ids(self._prefill.original, self._prefill.credentials)
        # A template may read the clock: tokens of another prompt must not be gone on from.
        if prompt is None or len(prompt) != prefill.prompt_tokens or prompt[len(prompt) - len(tail) :] != tail:
            raise UpstreamUnavailable("the prompt's token ids cannot be had again")
        return prompt


def _handed_over(prefill: PrefillAnswer) -> tuple[int, list[int]]:
    """Return the first token's id and the prompt's last ids, as the connector put them into vLLM's answer."""
    params: Any = prefill.raw.get("kv_transfer_params")
    try:
        first, *tail = read_token_ids([params[CLAIM_KEY]["first_token"], *params[CLAIM_KEY]["prompt_tail"]])
        return first, tail
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError("vLLM's connector did not take the claim: do both sides share ANCHORLEG_SECRET?") from error


def _lost(error: Exception) -> UpstreamFailed:
    return UpstreamFailed(f"the answer broke off and could not be continued: {error}", code="decode_lost")


async def _once(chunk: bytes) -> AsyncGenerator[bytes, None]:
    yield chunk
