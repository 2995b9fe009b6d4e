"""The lane's answer phase: vLLM's answer to the prefill leg becomes the client's, or vLLM serves the request after all."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import structlog

from gateway.errors import answer_lost
from gateway.generation import Generation
from gateway.lane import LaneParts, Prefill
from gateway.parsed import ParsedStream, Parts, parsed_whole
from gateway.reasoning import ReasoningTokens, reasoning_tokens
from gateway.recovery import NotHealed, Way
from gateway.rendering import Derenderer, Rendered, make_parsing
from gateway.reply import AnswerState, PrefillAnswer, StreamWriter, json_writer, read_prefill_answer, stream_writer
from gateway.resuming import goes_on_exactly
from gateway.serving import HandedOver, read_handed_over
from gateway.sse import EVENT_STREAM
from gateway.text import tail_suffices
from gateway.tokens import Batch
from gateway.upstream import Replayed, UpstreamUnavailable
from handoff.prompt import digest, packed

log = structlog.get_logger(__name__)

JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Answer:
    """What the client gets: a status, headers, and a body that comes in chunks (to be closed when not read to its end)."""

    status: int
    headers: dict[str, str]
    chunks: AsyncGenerator[bytes, None]


class Relay:
    """One request's answer. `outcome` tells, once the chunks have ended, how it went."""

    def __init__(self, parts: LaneParts, prefill: Prefill) -> None:
        self._parts = parts
        self._prefill = prefill
        self._generation: Generation | None = None
        self._reasoning: ReasoningTokens | None = None
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
        plan, card = self._prefill.plan, self._prefill.card
        try:
            told = read_prefill_answer(plan.endpoint, body)
            handed_over = read_handed_over(told.raw)
            if plan.sampling.logprobs is not None and len(told.logprobs) != 1:
                raise ValueError("the first token's logprobs are missing")
            if not _is_rendered(handed_over, self._prefill.rendered):
                raise ValueError("the prompt is another one than vLLM rendered: does its template read the clock?")
        except ValueError as error:
            log.warning("prefill leg without a handoff; vLLM serves the request", error=str(error))
            return await self._replay("no_handoff")
        if self._parts.servings.judge(handed_over.serving, plan, self._prefill.original, card) is not None:
            return await self._replay("vllm_configured_otherwise")
        tail = told.prompt_token_ids or handed_over.prompt_tail
        if not tail_suffices(card.tokenizer, tail, told.prompt_tokens, skip_special_tokens=plan.form.skip_special_tokens):
            return await self._replay("prompt_tail")
        if handed_over.serving.reasoning_parser:
            self._reasoning = reasoning_tokens(handed_over.serving.reasoning_parser, card.tokenizer)
        state = AnswerState(card, plan, tail)
        held = plan.form.stream and not goes_on_exactly(plan)
        self._generation = Generation(self._parts, self._prefill, told, handed_over, held=held)
        batches = self._generation.batches()
        if plan.form.stream:
            try:
                return self._streamed(told, state, await _begun(batches) if held else batches)
            except NotHealed as error:
                return await self._replay(error.code)
        try:
            whole = await self._whole(told, state, batches)
        except UpstreamUnavailable as error:
            log.warning("an answer is lost before its first byte; vLLM serves the request", error=str(error))
            return await self._replay(error.code if isinstance(error, NotHealed) else "not_parsed")
        length = {"content-type": JSON, "content-length": str(len(whole))}
        return Answer(200, self._timing() | length, _once(whole))

    def _timing(self) -> dict[str, str]:
        return {"server-timing": self._prefill.stages.header()}

    def _free(self) -> None:
        self._prefill.stream.cancel()

    def _streamed(self, told: PrefillAnswer, state: AnswerState, batches: AsyncGenerator[Batch, None]) -> Answer:
        if self._prefill.rendered is None:
            chunks = self._stream(stream_writer(self._prefill.plan, told, state), state, batches)
        else:
            chunks = self._parsed(ParsedStream(self._to_parse(told, state, self._prefill.rendered)), batches)
        return Answer(200, self._timing() | {"content-type": EVENT_STREAM}, chunks)

    async def _stream(
        self, writer: StreamWriter, state: AnswerState, batches: AsyncGenerator[Batch, None]
    ) -> AsyncGenerator[bytes, None]:
        head = writer.begin()
        try:
            async with aclosing(batches):
                async for batch in batches:
                    chunk = head + writer.write(batch)
                    head = b""
                    if state.finish_reason is not None:
                        self._free()  # a client that reads slowly holds no slot
                    if chunk:
                        yield chunk
                    if state.finish_reason is not None:
                        break
        except NotHealed as error:
            self.outcome = "failed"
            log.warning("an answer is lost", code=error.code, error=str(error))
            yield writer.fail(answer_lost())
            return
        finally:
            self._free()
        self._ended()
        yield writer.end()

    async def _parsed(self, stream: ParsedStream, batches: AsyncGenerator[Batch, None]) -> AsyncGenerator[bytes, None]:
        """Yield what vLLM's parsers make of the tokens."""
        try:
            async with aclosing(batches), aclosing(stream.chunks(batches)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self._free()
        if stream.error is None:
            self._ended()
        else:
            log.warning("an answer was not parsed to its end", error=str(stream.error))
            self.outcome = "failed"

    async def _whole(self, told: PrefillAnswer, state: AnswerState, batches: AsyncGenerator[Batch, None]) -> bytes:
        """Return the whole answer; raises UpstreamUnavailable, NotHealed among them."""
        rendered = self._prefill.rendered
        try:
            async with aclosing(batches):
                if rendered is not None:
                    whole = await parsed_whole(self._to_parse(told, state, rendered), batches)
                else:
                    writer = json_writer(self._prefill.plan, told, state)
                    async for batch in batches:
                        writer.add(batch)
                        if state.finish_reason is not None:
                            break
                    whole = writer.end()
        finally:
            self._free()
        self._ended()
        return whole

    def _to_parse(self, told: PrefillAnswer, state: AnswerState, rendered: Rendered) -> Parts:
        prefill, upstream = self._prefill, self._parts.upstream
        parsing = make_parsing(prefill.original, prefill.plan, prefill.card, rendered)
        derenderer = Derenderer(upstream.post, prefill.credentials, upstream.token_timeout_s, parsing)
        return Parts(prefill.plan, told, state, parsing, derenderer, self._reasoning)

    def _ended(self) -> None:
        as_begun = self._replayed is None and self._generation is not None and not self._generation.resumed
        self.outcome = "completed" if as_begun else "resumed"

    async def _replay(self, code: str) -> Answer:
        """Let vLLM serve the original request: nothing of it has been answered yet. Raises UpstreamFailed."""
        self._free()
        self._parts.metrics.resumed.labels(code, Way.WHOLE).inc()
        upstream, prefill = self._parts.upstream, self._prefill
        try:
            self._replayed = await upstream.replay(prefill.plan.endpoint, prefill.original, prefill.credentials)
        except UpstreamUnavailable as error:
            self.outcome = "failed"
            raise answer_lost() from error
        headers = self._timing() | {"content-type": self._replayed.content_type}
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


def _is_rendered(handed_over: HandedOver, rendered: Rendered | None) -> bool:
    return rendered is None or handed_over.prompt_digest == digest(packed(rendered.prompt))


async def _begun(batches: AsyncGenerator[Batch, None]) -> AsyncGenerator[Batch, None]:
    """Return the same batches once the first one is there; raises what it raises."""
    try:
        first = await anext(batches)
    except BaseException:
        await batches.aclose()
        raise
    return _with_first(first, batches)


async def _with_first(first: Batch, rest: AsyncGenerator[Batch, None]) -> AsyncGenerator[Batch, None]:
    async with aclosing(rest):
        yield first
        async for batch in rest:
            yield batch


async def _once(chunk: bytes) -> AsyncGenerator[bytes, None]:
    yield chunk
