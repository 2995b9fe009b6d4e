"""An answer's tokens: the first one from vLLM, the rest from the daemon, and from elsewhere if the daemon fails."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import structlog

from gateway.answer import PrefillAnswer
from gateway.decode_client import DecodeFailed
from gateway.decoded import Decoded, Prefilled
from gateway.endpoints import Endpoint
from gateway.lane import LaneParts, Prefill
from gateway.prompts import prompt_ids
from gateway.recovery import NotHealed, Progress, Recovery
from gateway.serving import HandedOver
from gateway.tokens import Batch

log = structlog.get_logger(__name__)


class Generation:
    """One answer's tokens. `resumed` tells whether its daemon has failed it.

    With `held` the first token waits for the daemon's first step: a daemon that fails before it is NotHealed then, so that
    vLLM can serve the whole request while its client has nothing of it.
    """

    def __init__(self, parts: LaneParts, prefill: Prefill, told: PrefillAnswer, handed_over: HandedOver, *, held: bool) -> None:
        self._parts = parts
        self._prefill = prefill
        self._told = told
        self._held = held
        self._progress = Progress(
            prompt_tokens=told.prompt_tokens,
            prompt_tail=handed_over.prompt_tail,
            prompt_digest=handed_over.prompt_digest,
            limit=_limit(prefill, told),
            prompt=_known_prompt(prefill, told),
            ids=[handed_over.first_token],
        )
        self.resumed = False

    async def batches(self) -> AsyncGenerator[Batch, None]:
        """Yield every token of the answer exactly once, whoever decodes it, up to a finish; raises NotHealed."""
        metrics, progress = self._parts.metrics, self._progress
        finish = "stop" if self._told.finished else "length" if progress.limit == 1 else None
        first = Batch(tuple(progress.ids), finish, self._told.logprobs)
        progress.last = time.perf_counter()
        if finish is not None:
            self._prefill.stream.cancel()  # whoever reads this may take its time
        async with aclosing(self._rest()) as rest:
            ready = [first, await anext(rest)] if self._held and finish is None else [first]
            metrics.ttft_seconds.observe(time.perf_counter() - self._prefill.stages.began)
            metrics.tokens.inc()
            yield first
            for batch in ready[1:]:
                self._count(batch)
                yield batch
            if finish is None and ready[-1].finish is None:
                async for batch in rest:
                    self._count(batch)
                    yield batch

    def _count(self, batch: Batch) -> None:
        self._progress.ids.extend(batch.ids)
        self._parts.metrics.tokens.inc(len(batch.ids))

    async def _rest(self) -> AsyncGenerator[Batch, None]:
        progress = self._progress
        try:
            async with aclosing(self._decoded()) as decoded:
                async for batch in decoded:
                    yield batch
                    if batch.finish is not None:
                        return
        except DecodeFailed as error:
            log.warning("decode leg failed", code=error.code, error=str(error), tokens=len(progress.ids))
            if self._held and len(progress.ids) == 1:
                raise NotHealed(error.code, str(error)) from error
            code = error.code
        self.resumed = True
        self._prefill.stream.cancel()
        if len(progress.ids) >= progress.limit:
            yield Batch((), "length")
            return
        recovery = Recovery(self._parts, self._prefill, progress)
        async with aclosing(recovery.batches(code, begun=self._prefill.plan.form.stream)) as recovered:
            async for batch in recovered:
                yield batch

    async def _decoded(self) -> AsyncGenerator[Batch, None]:
        """Yield the daemon's tokens; raises DecodeFailed."""
        metrics, prefill, progress = self._parts.metrics, self._prefill, self._progress
        decoded = Decoded(prefill.stream, self._parts.settings, prefill.plan, prefill.card, progress.limit)
        prefilled = Prefilled(progress.prompt_tokens, progress.prompt_tail, progress.ids[0])
        progress.prompt = await decoded.landed(prefilled)
        metrics.stage_seconds.labels("handoff").observe(time.perf_counter() - progress.last)
        second = True
        async with aclosing(decoded.batches()) as batches:
            async for batch in batches:
                now = time.perf_counter()
                histogram = metrics.stage_seconds.labels("gap") if second else metrics.inter_token_seconds
                histogram.observe(now - progress.last)
                second, progress.last = False, now
                yield batch


def _limit(prefill: Prefill, told: PrefillAnswer) -> int:
    """Output tokens in all: what the client asked for, within the context."""
    room = max(1, prefill.card.context_tokens - told.prompt_tokens)
    return min(prefill.plan.max_tokens or room, room)


def _known_prompt(prefill: Prefill, told: PrefillAnswer) -> list[int] | None:
    """Return the prompt's ids where the request brings them, or vLLM has told them."""
    if prefill.rendered is not None:
        return list(prefill.rendered.prompt)
    if told.prompt_token_ids is not None:
        return told.prompt_token_ids
    return prompt_ids(prefill.original) if prefill.plan.endpoint is Endpoint.COMPLETIONS else None
