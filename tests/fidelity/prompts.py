"""Fifty prompts of three kinds: of chat, for code, and such whose answer copies the prompt, where speculation finds it."""

import tomllib
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Literal

from tests.kit.e2e import PROMPTS

Kind = Literal["chat", "code", "copy"]

_BENCHED = Path(__file__).parents[2] / "benchmarks" / "prompts.toml"
_CODE = (
    "Write a Python function that checks whether a word is a palindrome.",
    "Write a Python function that merges two sorted lists.",
    "Write a Python program that counts the words of a text file.",
    "Write a JavaScript function that reverses a string.",
    "Write a shell script that renames all .txt files of a folder to .md.",
    "Write a C function that swaps two integers through pointers.",
    "Write a Java class for a bank account with deposit and withdraw.",
    "Write a regular expression that matches a date such as 2024-05-17, and explain it.",
    "Write a Python test for a function add(a, b).",
    "Write a JSON object that describes a book with two authors.",
)
_EDITS = (
    "Write the following out once more, without any change.",
    "Put a line of stars before the following and another one after it, and change nothing else.",
    "Say the following twice.",
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a user says, and of which kind it is."""

    kind: Kind
    text: str


def prompts(count: int) -> list[Prompt]:
    """Return the first of the fifty, of each kind in turn."""
    benched: dict[str, list[str]] = tomllib.loads(_BENCHED.read_text())
    copied = [_without_wish(text) for text in benched["copy"]]
    listed: dict[Kind, list[str]] = {
        "chat": [*benched["chat"], *PROMPTS],
        "code": [*benched["code"], *_CODE],
        "copy": [*benched["copy"], *(f"{edit}\n\n{text}" for edit in _EDITS for text in copied)],
    }
    in_turn = zip_longest(*([Prompt(kind, text) for text in dict.fromkeys(texts)] for kind, texts in listed.items()))
    return [prompt for row in in_turn for prompt in row if prompt is not None][:count]


def _without_wish(text: str) -> str:
    """Leave out the first line, which says what is to be done."""
    return text.partition("\n\n")[2]
