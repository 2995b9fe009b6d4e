"""Model cards: tokenizers and generation defaults, told by the daemons and kept by fingerprint.

The gateway holds no model files. A tokenizer takes a quarter of a second to read, so cards are fetched as soon as a daemon is
seen, in a thread, and not when the first request needs them.
"""

import asyncio
from dataclasses import dataclass

from tokenizers import Tokenizer

from gateway.decode_client import DecodeClient, DecodeFailed
from handoff import decode_pb2 as pb

_JSON_BYTES = 6  # "\u0041"
_BODY_SLACK = 1 << 20


@dataclass(frozen=True, slots=True)
class Defaults:
    """The model's own generation defaults; None where it has none."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class Card:
    """One model, as its daemons describe it."""

    fingerprint: str
    model: str
    context_tokens: int
    stop_token_ids: tuple[int, ...]
    eos_token_id: int | None  # the one of them that is no stop_reason
    defaults: Defaults
    tokenizer: Tokenizer
    vocab_size: int  # the model's: the ids that logits have a place for
    longest_token: int  # characters; so many tokens at least, for so many characters


class Cards:
    """Owns the cards seen so far."""

    def __init__(self, client: DecodeClient, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._cards: dict[str, Card] = {}
        self._fetching: dict[str, asyncio.Task[Card]] = {}

    def longest_body(self) -> int:
        """Return the bytes of a request body above which no known model's context can hold the prompt.

        A character takes at most six bytes of JSON, a token at most its longest one's characters; what is not prompt is small.
        """
        sizes = [card.context_tokens * card.longest_token * _JSON_BYTES for card in self._cards.values()]
        return max(sizes, default=0) + _BODY_SLACK

    def get(self, fingerprint: str) -> Card | None:
        """Return a card that is here; None otherwise."""
        return self._cards.get(fingerprint)

    async def fetch(self, fingerprint: str, endpoint: str) -> Card:
        """Return a card, asking the daemon at `endpoint` for it if need be; raises DecodeFailed."""
        card = self._cards.get(fingerprint)
        if card is not None:
            return card
        task = self._fetching.get(fingerprint)
        if task is None:
            task = asyncio.create_task(self._fetch(fingerprint, endpoint))
            self._fetching[fingerprint] = task
            task.add_done_callback(lambda _: self._fetching.pop(fingerprint, None))
        # Shared: one caller's cancellation must not take the card from the others.
        return await asyncio.shield(task)

    async def _fetch(self, fingerprint: str, endpoint: str) -> Card:
        message = await self._client.describe(endpoint, self._timeout_s)
        if message.fingerprint != fingerprint:
            raise DecodeFailed("wrong_card", f"{endpoint} has card {message.fingerprint}, {fingerprint} was announced")
        try:
            card = await asyncio.to_thread(read_card, message)
        except Exception as error:  # tokenizers raises no narrower one
            raise DecodeFailed("bad_card", f"the card of {endpoint} cannot be read: {error}") from error
        self._cards[fingerprint] = card
        return card


def read_card(message: pb.ModelCard) -> Card:
    """Read a daemon's answer to Describe."""
    d = message.defaults
    tokenizer = Tokenizer.from_str(message.tokenizer.decode())
    return Card(
        fingerprint=message.fingerprint,
        model=message.model,
        context_tokens=message.context_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        eos_token_id=message.eos_token_id if message.HasField("eos_token_id") else None,
        defaults=Defaults(
            temperature=d.temperature if d.HasField("temperature") else None,
            top_p=d.top_p if d.HasField("top_p") else None,
            top_k=d.top_k if d.HasField("top_k") else None,
            min_p=d.min_p if d.HasField("min_p") else None,
            repetition_penalty=d.repetition_penalty if d.HasField("repetition_penalty") else None,
            max_tokens=d.max_tokens if d.HasField("max_tokens") else None,
            presence_penalty=d.presence_penalty if d.HasField("presence_penalty") else None,
            frequency_penalty=d.frequency_penalty if d.HasField("frequency_penalty") else None,
        ),
        tokenizer=tokenizer,
        vocab_size=message.vocab_size,
        longest_token=max(map(len, tokenizer.get_vocab()), default=1),
    )
