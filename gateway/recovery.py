"""How an answer goes on that its daemon has failed: no token lost, none twice, and none that vLLM would not have given.

Each way is tried once, in the order of `Recovery.batches`. What a way cannot do exactly, it leaves to the next.
"""

import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

import msgspec
import structlog

from gateway.body import Body
from gateway.decode_client import DecodeFailed
from gateway.decoded import Decoded, Prefilled
from gateway.eligibility import Unsupported
from gateway.endpoints import Endpoint
from gateway.lane import LaneParts, Prefill
from gateway.plan import Plan
from gateway.prompts import tokenize_body
from gateway.resuming import goes_on_exactly, resume_completion
from gateway.serving import read_handed_over
from gateway.slots import Wanted
from gateway.tokens import Batch
from gateway.upstream import UpstreamUnavailable
from handoff.claim import SignedClaim, to_params
from handoff.prompt import digest, packed
from leases import LeasesUnavailable

log = structlog.get_logger(__name__)

_OF_THE_FORM = frozenset(
    {
        "kv_transfer_params",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "stop",  # the gateway has looked for them in what the client has: vLLM's ids must go on where they are
        "stream",
        "stream_options",
    }
)


class Way(StrEnum):
    """Who goes on with an answer; values are a metric's label."""

    VLLM = "vllm"  # decodes on after the tokens so far
    DAEMON = "daemon"  # another one, from a second prefill
    RETOLD = "retold"  # vLLM answers the whole request again: what the client has is left out
    WHOLE = "whole"  # vLLM serves the whole request: the client has nothing yet


@dataclass(slots=True)
class Progress:
    """What has been generated so far, by whom: enough for another engine to go on."""

    prompt_tokens: int
    prompt_tail: Sequence[int]  # the prompt's last ids, told with vLLM's answer
    prompt_digest: str  # of all its ids, told with them
    limit: int  # output tokens in all
    prompt: list[int] | None = None
    ids: list[int] = field(default_factory=list)
    last: float = 0.0  # perf_counter of the newest batch


class NotHealed(UpstreamUnavailable):
    """No way was left, or none went well; `code` is the last failure's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Recovery:
    """Goes on with one answer."""

    def __init__(self, parts: LaneParts, prefill: Prefill, progress: Progress) -> None:
        self._parts = parts
        self._prefill = prefill
        self._progress = progress

    async def batches(self, code: str, *, begun: bool) -> AsyncGenerator[Batch, None]:
        """Yield the rest of the answer, up to a finish, after a failure of this code.

        `begun`: the client has a part of it, so that it can be given no other. Whoever reads this adds each batch to the
        progress before the next one is asked for. Raises NotHealed.
        """
        why: Exception = UpstreamUnavailable("nobody can go on with it exactly")
        for way, go_on in await self._ways(begun=begun):
            self._parts.metrics.resumed.labels(code, way).inc()
            log.warning("an answer goes on", way=way, code=code, tokens=len(self._progress.ids))
            try:
                async with aclosing(go_on()) as batches:
                    async for batch in batches:
                        self._check(batch)
                        yield batch
                        if batch.finish is not None:
                            return
            except DecodeFailed as error:
                code, why = error.code, error
            except LeasesUnavailable as error:
                code, why = "leases_unavailable", error
            except UpstreamUnavailable as error:
                code, why = "vllm_unavailable", error
            log.warning("an answer did not go on", way=way, error=str(why))
            if len(self._progress.ids) >= self._progress.limit:
                yield Batch((), "length")
                return
        raise NotHealed(code, str(why)) from why

    async def _ways(self, *, begun: bool) -> list[tuple[Way, Callable[[], AsyncGenerator[Batch, None]]]]:
        plan = self._prefill.plan
        ways: list[tuple[Way, Callable[[], AsyncGenerator[Batch, None]]]] = []
        resumes = goes_on_exactly(plan)
        prompt = await self._prompt() if resumes or begun else None
        if prompt is not None and resumes:
            ways.append((Way.VLLM, partial(self._by_vllm, prompt)))
        if prompt is not None and begun:
            ways.append((Way.DAEMON, partial(self._by_another_daemon, prompt)))
        if begun and not plan.parsed and plan.sampling.temperature == 0:
            # Only a greedy answer is the same a second time.
            ways.append((Way.RETOLD, self._retold))
        return ways

    async def _prompt(self) -> list[int] | None:
        """Return the prompt's ids: the daemon's or vLLM's, where they are known, else vLLM's of a second time."""
        progress, prefill = self._progress, self._prefill
        if progress.prompt is not None:
            return progress.prompt
        content = tokenize_body(prefill.plan.endpoint, prefill.original)
        try:
            prompt = await self._parts.upstream.prompt_ids(content, prefill.credentials)
        except UpstreamUnavailable as error:
            log.warning("a prompt's ids cannot be had again", error=str(error))
            return None
        # A template may read the clock: tokens of another prompt must not be gone on from.
        if prompt is None or digest(packed(prompt)) != progress.prompt_digest:
            return None
        progress.prompt = prompt
        return prompt

    def _check(self, batch: Batch) -> None:
        if self._prefill.plan.sampling.logprobs is not None and len(batch.logprobs) != len(batch.ids):
            raise UpstreamUnavailable("logprobs are missing")

    def _completion(self, prompt: list[int]) -> dict[str, Any] | None:
        """Return the completion that goes on with the tokens so far; None where it would be another answer."""
        done = self._progress.ids
        return resume_completion(self._prefill.plan, prompt, done, self._progress.limit - len(done))

    async def _by_vllm(self, prompt: list[int]) -> AsyncGenerator[Batch, None]:
        """Let vLLM decode what follows; its prefix cache spares it most of the prompt."""
        content = json.dumps(self._completion(prompt)).encode()
        async with aclosing(self._parts.upstream.tokens(Endpoint.COMPLETIONS, content, self._prefill.credentials)) as tokens:
            async for batch in tokens:
                yield batch

    async def _by_another_daemon(self, prompt: list[int]) -> AsyncGenerator[Batch, None]:
        """Have prompt and answer prefilled for another slot: the last token so far is that daemon's first one."""
        plan, card = self._prefill.plan, self._prefill.card
        *before, first = self._progress.ids
        whole, limit = [*prompt, *before], self._progress.limit - len(before)
        failed, speculate = (self._prefill.node_id,), self._prefill.wish.speculate
        wanted = Wanted(plan, card, len(whole) + limit, limit, len(before), failed, speculate)
        reserved = await self._parts.slots.reserve_again(self._prefill.wish, wanted)
        if isinstance(reserved, Unsupported):
            raise DecodeFailed(reserved.reason, reserved.detail)
        try:
            await self._prefill_again(again(plan, whole, first, reserved.claim), first)
            decoded = Decoded(reserved.stream, self._parts.settings, plan, card, limit)
            await decoded.landed(Prefilled(len(whole), whole, first))
            async with aclosing(decoded.batches()) as batches:
                async for batch in batches:
                    yield batch
        finally:
            reserved.stream.cancel()

    async def _prefill_again(self, request: dict[str, Any], first: int) -> None:
        upstream, credentials = self._parts.upstream, self._prefill.credentials
        content, seconds = json.dumps(request).encode(), upstream.token_timeout_s
        status, body = await upstream.post(Endpoint.COMPLETIONS, content, credentials, seconds)
        if status != 200:
            raise UpstreamUnavailable(f"vLLM's {Endpoint.COMPLETIONS} answered {status} to the second prefill")
        try:
            handed_over = read_handed_over(msgspec.json.decode(body))
        except (ValueError, RecursionError) as error:
            raise UpstreamUnavailable(f"the second prefill was not handed over: {error}") from error
        if handed_over.first_token != first:
            raise UpstreamUnavailable("the second prefill made another token")

    async def _retold(self) -> AsyncGenerator[Batch, None]:
        """Let vLLM answer the original request again: what follows the tokens so far, if those come again."""
        plan, so_far = self._prefill.plan, tuple(self._progress.ids)
        content = retelling(self._prefill.original, plan)
        heard = 0
        async with aclosing(self._parts.upstream.tokens(plan.endpoint, content, self._prefill.credentials)) as tokens:
            async for batch in tokens:
                known = so_far[heard : heard + len(batch.ids)]
                heard += len(known)
                new = batch.ids[len(known) :]
                if batch.ids[: len(known)] != known or (batch.finish is not None and not new):
                    raise UpstreamUnavailable("vLLM gives another answer than the one that has begun")
                if new:
                    yield Batch(new, batch.finish, batch.logprobs[len(known) :])


def again(plan: Plan, prompt: Sequence[int], first: int, claim: SignedClaim) -> dict[str, Any]:
    """Return the completion that prefills a prompt for a second daemon: what follows can only be the token that is known."""
    request = {
        "model": plan.model,
        "prompt": list(prompt),
        "max_tokens": 1,
        "temperature": 0,
        "allowed_token_ids": [first],
        "ignore_eos": True,  # where the request ignores it, this token may be one
        "kv_transfer_params": to_params(claim),
        "priority": plan.priority,
    }
    # Without its salt the prompt's blocks would enter the prefix cache that all clients share.
    return request if plan.cache_salt is None else {**request, "cache_salt": plan.cache_salt}


def retelling(body: Body, plan: Plan) -> bytes:
    """Return a request as it came, but as a stream that tells token ids and ends at no stop string."""
    keep = [key for key, _ in body.items() if key not in _OF_THE_FORM]
    extra = {"stream": True, "return_token_ids": True}
    if plan.sampling.logprobs is not None:
        extra["return_tokens_as_token_ids"] = True
    return body.with_members(keep, extra)
