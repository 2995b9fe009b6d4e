"""Prompts of random ids: no two begin alike, but for the last, most of which vLLM has in its prefix cache by then."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

HIT = "prefix hit"
_ALIKE = 0.8  # share of an earlier prompt that the last one begins with
_NEW = 0.3  # as much again as this share follows, of other ids


@dataclass(frozen=True, slots=True)
class Prompt:
    """`name` says what is particular about it."""

    name: str
    ids: tuple[int, ...]


def prompts(lengths: Sequence[int], vocab_size: int) -> list[Prompt]:
    """Return one prompt of each length, and one that shares most of the longest."""
    random = Random(7)
    made = [Prompt("prompt", tuple(random.randrange(vocab_size) for _ in range(length))) for length in lengths]
    known = max((prompt.ids for prompt in made), key=len)
    beginning, new = known[: int(len(known) * _ALIKE)], int(len(known) * _NEW)
    return [*made, Prompt(HIT, (*beginning, *(random.randrange(vocab_size) for _ in range(new))))]
