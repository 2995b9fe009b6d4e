"""Tokenizer folders, a daemon's grammars over them, and grammars that last until a test lets them go."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from decode_daemon.grammar import Form, Grammars

MODEL_VOCAB = 420  # more than the tokenizer's, and no multiple of 32, as models have it
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["ä", "日本", 7, None]}, "maxItems": 3},
        "inner": {"$ref": "#/$defs/point"},
    },
    "required": ["name", "age"],
    "$defs": {"point": {"type": "object", "properties": {"x": {"type": "number"}}, "additionalProperties": False}},
}
LETTERS = [*(chr(code) for code in range(0x20, 0x7F)), "\n", "<end>"]
"""Tokens of the tiny model's vocabulary, by id."""


def write_tokenizer(folder: Path) -> None:
    """A tokenizer as models have it: byte-level BPE of about 300 ids, two special ones at the end, of which <end> is eos."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=[], show_progress=False
    )
    corpus = ['{"name": "Ada", "age": 36, "tags": ["ä", "日本"]}', "yes or no, maybe 42.5 times"]
    tokenizer.train_from_iterator(corpus * 9, trainer)
    tokenizer.add_special_tokens([AddedToken("<end>", special=True), AddedToken("<turn>", special=True)])
    (folder / "config.json").write_text('{"model_type": "llama"}')
    _write(folder, tokenizer)


def write_letters(folder: Path) -> None:
    """A tokenizer of one id for each of LETTERS, beside the tiny model; <end> is eos."""
    _write(folder, Tokenizer(models.WordLevel({letter: at for at, letter in enumerate(LETTERS)}, unk_token="?")))


def _write(folder: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}')


def grammars_of(folder: Path, **changes: Any) -> Grammars:
    return Grammars(folder, MODEL_VOCAB, **{"cache_bytes": 64 << 20, "wait_s": 5.0} | changes)


async def ready(folder: Path, **changes: Any) -> Grammars:
    """Grammars whose tokenizer has been read."""
    grammars = grammars_of(folder, **changes)
    grammars.start()
    await grammars.ready()
    return grammars


class HeldForm(Form):
    """A grammar whose parsing and compiling last until `held` lets them go."""

    __slots__ = ()
    go = threading.Event()

    def parse(self) -> None:
        assert self.go.wait(10)
        super().parse()

    def compile(self, compiler: Any) -> Any:
        assert self.go.wait(10)
        return super().compile(compiler)


@contextmanager
def held() -> Iterator[threading.Event]:
    """Hold every HeldForm until the block ends, or the event it gets is set."""
    HeldForm.go.clear()
    try:
        yield HeldForm.go
    finally:
        HeldForm.go.set()
