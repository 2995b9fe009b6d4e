"""What the gateway's units are tested with: a trained tokenizer, a card, requests, and vLLM's answers to prefill legs."""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.fakes import SERVING
from gateway.body import Body
from gateway.cards import Card, read_card
from gateway.upstream import Credentials
from handoff import decode_pb2 as pb
from handoff.claim import CLAIM_KEY
from handoff.prompt import digest, packed

MODEL = "tiny"
SECRET = "a secret of the gateway's tests"
CREDENTIALS: Credentials = {b"authorization": b"Bearer client", b"x-request-id": b"r1"}
END_TOKEN = "<end>"

_CORPUS = [
    "The capital of France is Paris. The river is the Seine.",
    "def f(x):\n    return x + 1\n\n\n    # a    b",
    "naïve café façade übergroß Straße",
    "日本語のテキスト、漢字とかな。",
    "emoji 🙂🙃👩‍👩‍👧‍👦🇫🇷 and ½ ∑ → ∞",
    "Привет, мир! Γειά σου Κόσμε",
    "stop here. Stop! STOP? END",
]


@cache
def bpe_tokenizer() -> Tokenizer:
    """A byte-level BPE of 400 tokens, most of them pieces of multi-byte characters, and one special token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=[], show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(END_TOKEN, special=True)])
    return tokenizer


def ids_of(text: str) -> list[int]:
    return list(bpe_tokenizer().encode(text, add_special_tokens=False).ids)


def end_id() -> int:
    token = bpe_tokenizer().token_to_id(END_TOKEN)
    assert token is not None
    return int(token)


def card_message(*, fingerprint: str = "card-1", context_tokens: int = 4096, **defaults: Any) -> pb.ModelCard:
    return pb.ModelCard(
        fingerprint=fingerprint,
        model=MODEL,
        identity="tiny-weights",
        context_tokens=context_tokens,
        tokenizer=bpe_tokenizer().to_str().encode(),
        stop_token_ids=[end_id()],
        eos_token_id=end_id(),
        vocab_size=bpe_tokenizer().get_vocab_size(),
        defaults=pb.SamplingDefaults(**defaults),
    )


def card(**fields: Any) -> Card:
    return read_card(card_message(**fields))


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], **fields}


def body(**fields: Any) -> Body:
    return Body(json.dumps(chat(**fields)).encode())


def prompt_request(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "The capital of France is", **fields}


PROMPT = tuple(ids_of("The capital of France is"))


def handed_over(first: int, prompt: Sequence[int] = PROMPT, **serving: Any) -> dict[str, Any]:
    """What vLLM's connector tells of a claim that it took."""
    told = {"prompt_tail": list(prompt[-32:]), "prompt_digest": digest(packed(prompt))}
    return {CLAIM_KEY: {"first_token": first, **told, "serving": SERVING | serving}}


def prefill_answer(first: int, *, prompt: Sequence[int] = PROMPT, **over: Any) -> dict[str, Any]:
    """vLLM's answer to a chat's prefill leg whose claim the connector took."""
    message = {"role": "assistant", "content": bpe_tokenizer().decode([first]), "refusal": None, "reasoning": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": MODEL,
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": {
            "prompt_tokens": len(prompt),
            "total_tokens": len(prompt) + 1,
            "completion_tokens": 1,
            "prompt_tokens_details": {"cached_tokens": 16},
        },
        "kv_transfer_params": handed_over(first, prompt),
        **over,
    }


def prefill_completion(first: int, *, prompt: Sequence[int] = PROMPT, **over: Any) -> dict[str, Any]:
    """vLLM's answer to a completion's prefill leg whose claim the connector took."""
    text = bpe_tokenizer().decode([first])
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    return prefill_answer(first, prompt=prompt) | {"id": "cmpl-1", "object": "text_completion", "choices": [choice]} | over
