"""A daemon's stream as batches of tokens. Nothing passes that this request's answer cannot have: the daemon has failed then."""

import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from gateway.cards import Card
from gateway.decode_client import DecodeFailed, DecodeStream
from gateway.plan import Plan, stop_ids
from gateway.settings import GatewaySettings
from gateway.tokens import Batch, TokenLogprobs
from handoff import decode_pb2 as pb

_FINISH = {pb.Tokens.NONE: None, pb.Tokens.STOP: "stop", pb.Tokens.LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What vLLM has handed to a daemon."""

    prompt_tokens: int
    prompt_tail: Sequence[int]  # the prompt's last ids
    first: int  # the token that was prefilled

    def is_landed(self, landed: pb.Landed) -> bool:
        """Tell whether this is what a daemon says has landed."""
        ids, tail = landed.prompt_token_ids, list(self.prompt_tail)
        return landed.first_token == self.first and len(ids) == self.prompt_tokens and list(ids[len(ids) - len(tail) :]) == tail


class Decoded:
    """One daemon's part of an answer: at most `limit` tokens, the prefilled one among them."""

    def __init__(self, stream: DecodeStream, settings: GatewaySettings, plan: Plan, card: Card, limit: int) -> None:
        self._stream = stream
        self._settings = settings
        self._sampling = plan.sampling
        self._card = card
        self._stops = stop_ids(plan.sampling, card)
        self._limit = limit

    async def landed(self, prefilled: Prefilled) -> list[int]:
        """Wait for the KV cache to land; returns the prompt's ids. Raises DecodeFailed."""
        event = await self._stream.read(self._settings.landing_timeout_s)
        if event.WhichOneof("event") != "landed" or not prefilled.is_landed(event.landed):
            raise self._protocol("did not land what vLLM sent")
        return list(event.landed.prompt_token_ids)

    async def batches(self) -> AsyncGenerator[Batch, None]:
        """Yield what follows the prefilled token, up to a finish; raises DecodeFailed."""
        position = 1
        while True:
            # Token 2 waits for the engine's turn: vLLM, with the prompt in its cache, is better than a long queue.
            wait_s = self._settings.queue_timeout_s if position == 1 else self._settings.stall_timeout_s
            event = await self._stream.read(wait_s)
            if event.WhichOneof("event") != "tokens" or event.tokens.position != position:
                raise self._protocol(f"sent token {event.tokens.position}, not {position}")
            batch = self._batch(event.tokens)
            position += len(batch.ids)
            if position > self._limit:
                raise self._protocol(f"sent more than {self._limit} tokens")
            if batch.finish == "length" and position < self._limit:
                raise self._protocol(f"ended after {position} of {self._limit} tokens")
            if batch.finish is not None and len(batch.ids) > 1:
                # An answer's last token comes alone, as from vLLM: the chunk that ends an answer holds nothing of others.
                yield Batch(batch.ids[:-1], None, batch.logprobs[:-1])
                batch = Batch(batch.ids[-1:], batch.finish, batch.logprobs[-1:])
            yield batch
            if batch.finish is not None:
                return

    def _batch(self, tokens: pb.Tokens) -> Batch:
        if tokens.finish not in _FINISH or not (tokens.ids or tokens.finish):
            raise self._protocol("sent neither tokens nor a known finish")
        batch = Batch(tuple(tokens.ids), _FINISH[tokens.finish], tuple(map(_logprobs, tokens.logprobs)))
        if not self._plausible(batch):
            raise self._protocol("sent an unknown token, or a stop where none is")
        if not self._told_as_asked(tokens):
            raise self._protocol("sent other logprobs than it was asked for")
        return batch

    def _plausible(self, batch: Batch) -> bool:
        """Whether a batch is one that this answer can end, or go on, with."""
        if any(token >= self._card.vocab_size for token in batch.ids):
            return False
        before, last = batch.ids[:-1], batch.ids[-1:]
        if batch.finish == "stop":
            return bool(last) and last[0] in self._stops and self._stops.isdisjoint(before)
        return self._stops.isdisjoint(batch.ids)

    def _told_as_asked(self, tokens: pb.Tokens) -> bool:
        asked = self._sampling.logprobs
        if asked is None:
            return not tokens.logprobs
        most = self._card.vocab_size if asked < 0 else asked  # -1: all of them, as vLLM has it
        return len(tokens.logprobs) == len(tokens.ids) and all(self._possible(entry, most) for entry in tokens.logprobs)

    def _possible(self, entry: pb.TokenLogprobs, most: int) -> bool:
        return (
            len(entry.top_ids) == len(entry.top_logprobs) <= most
            and all(token < self._card.vocab_size for token in entry.top_ids)
            # Minus infinity is that of a token that may not come.
            and all(value < math.inf for value in (entry.logprob, *entry.top_logprobs))
        )

    def _protocol(self, what: str) -> DecodeFailed:
        return DecodeFailed("protocol", f"daemon {self._stream.endpoint} {what}")


def _logprobs(entry: pb.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(entry.logprob, tuple(zip(entry.top_ids, entry.top_logprobs, strict=False)))
