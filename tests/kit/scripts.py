"""What a model says in tests of the gateway's answers: tokens with logprobs, in two kinds of tokenizer."""

from dataclasses import dataclass, field, replace
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gateway.cards import Card
from gateway.tokens import TokenLogprobs
from tests.kit.gateway import bpe_tokenizer, card, ids_of

LIMIT = 40  # output tokens where a request names none
PROMPT_TAIL = 32  # ids of the prompt that the connector tells

_WORDS = "▁ ▁▁ ▁the ▁stop ▁a stop here top . , a b s t o p é 日本 🙂 ▁日 ab aab"


@cache
def byte_tokenizer() -> Tokenizer:
    """The byte-level BPE of the gateway's tests, with more added tokens: two special ones and one that is not."""
    tokenizer = Tokenizer.from_str(bpe_tokenizer().to_str())
    tokenizer.add_special_tokens([AddedToken("<turn>", special=True)])
    tokenizer.add_tokens([AddedToken("<call>", special=False)])
    return tokenizer


@cache
def sentencepiece_tokenizer() -> Tokenizer:
    """A vocabulary in Llama's manner: leading spaces in the pieces, byte fallback, a first space that decoding drops."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *_WORDS.split(), "\n"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<end>", special=True), AddedToken("<turn>", special=True)])
    tokenizer.add_tokens([AddedToken("<call>", special=False)])
    return tokenizer


def card_of(tokenizer: Tokenizer) -> Card:
    """A model that ends with <end>, or with <turn>, which only its generation config names."""
    end, turn = id_of(tokenizer, "<end>"), id_of(tokenizer, "<turn>")
    size = tokenizer.get_vocab_size()
    return replace(card(), tokenizer=tokenizer, vocab_size=size, stop_token_ids=(end, turn), eos_token_id=end)


def id_of(tokenizer: Tokenizer, piece: str) -> int:
    token = tokenizer.token_to_id(piece)
    assert token is not None, piece
    return int(token)


@dataclass(frozen=True)
class Script:
    """What a model answers to one request. Tokens beyond the answer's end are none of it."""

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each id, where the request asks for them
    tokenizer: Tokenizer = field(default_factory=byte_tokenizer, repr=False)
    prompt: tuple[int, ...] = tuple(ids_of("The capital of France is"))
    prompt_text: str = "The capital of France is"
    fingerprint: str | None = "fp-1"
