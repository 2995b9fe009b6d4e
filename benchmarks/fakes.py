"""What the scriptable vLLM and the scriptable decode daemon share: a model whose tokens are bytes.

Id 0 to 255 is that byte, id 256 ends an answer, and the ids above are stamps.
"""

import time
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

MODEL = "fake"
END = 256
PROMPT_IDS = tuple(b"the prompt")
SERVING: dict[str, Any] = {
    "defaults": {},
    "longest_answer": None,
    "logprobs_mode": "raw_logprobs",
    "grammar_backend": "auto",
    "compact_json": False,
    "reasoning_parser": "",
    "grammar_in_reasoning": False,
    "watermark": False,
}
"""What the connector tells of a vLLM that was told nothing in particular (connector/serving.py)."""

STAMP_TICKS = 1 << 16  # a stamp is the time of sending in ticks, modulo 0.66 s: short enough to be one token
STAMP_TICK_NS = 10_000


def card_name(context_tokens: int) -> str:
    """Return the fingerprint of a fake daemon's card."""
    return f"fake-{context_tokens}"


def stamp_text(ticks: int) -> str:
    """Return a stamp as it stands in a text."""
    return f"@{ticks % STAMP_TICKS:04x}"


def now_ticks() -> int:
    """Return the monotonic time in ticks, modulo their number."""
    return time.monotonic_ns() // STAMP_TICK_NS % STAMP_TICKS


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer whose ids are bytes, an end, and the stamps."""
    # GPT-2's printable stand-ins for bytes, in the order of the bytes they stand for.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_ins = {byte: chr(byte) for byte in printable}
    stand_ins |= {byte: chr(256 + n) for n, byte in enumerate(b for b in range(256) if b not in stand_ins)}
    vocab = {stand_ins[byte]: byte for byte in range(256)} | {"<end>": END}
    vocab |= {stamp_text(ticks): END + 1 + ticks for ticks in range(STAMP_TICKS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return tokenizer
