"""Drafts: guesses at the next tokens that cost next to nothing, several of which the engine verifies in one step.

A draft is never trusted, so whatever makes one needs no proof: a bad draft costs time, never another token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

# In SmolLM2's greedy chat, code and copies 21 % of the first tokens were right after one matching id, 49 % after two, all
# after four and 95 % after eight; more lengths between these found no better drafts.
LENGTHS = (8, 4, 2, 1)

_PIECE = 1024  # prompt tokens that are indexed before one step: it takes about a millisecond


@dataclass(frozen=True, slots=True)
class Source:
    """What a draft is made from. A source is believed as often as its earlier drafts were right."""

    name: str
    belief: float  # the share of its tokens, of 1, that is taken to be right before any was judged
    token_cost: float = 0.0  # of making one drafted token, in steps of one row


class Drafter(Protocol):
    """Guesses what comes next in one answer at a time.

    A draft head (EAGLE, MTP) is one: it is told the hidden states that it continues from. What it keeps of the prompt it has
    from elsewhere (a draft layer that was handed over), or catches up on as states come; until it can draft, it names no
    source, and other drafters fill in from the first step on.
    """

    @property
    def wants_hidden(self) -> bool:
        """Whether `saw` is to be given hidden states."""
        ...

    def begin(self, ids: Sequence[int]) -> None:
        """Begin an answer after `ids`: the prompt and the answer so far, whose last id no step has seen."""
        ...

    def saw(self, ids: Sequence[int], hidden: torch.Tensor | None) -> None:
        """Take in the `ids` of a step, and the states they were chosen from, before the final norm: [len(ids), hidden].

        Row n is of the token before the n-th of `ids`. `hidden` is None unless some drafter wants it.
        """
        ...

    def source(self) -> Source | None:
        """Return what a draft would be made from now, None when there is nothing."""
        ...

    def draft(self, count: int) -> Sequence[int]:
        """Return up to `count` ids that may come next; called only where `source` names one."""
        ...

    def end(self) -> None:
        """The answer is over, or nobody wants the rest: keep nothing of it."""
        ...


class NgramDrafter:
    """Drafts what followed the last time that the sequence went as it goes now (prompt lookup).

    Of a few lengths of suffix the longest that occurred before wins, at its latest place. The index is a hash table for each
    length, so a step's share of the work does not grow with the context: 5 µs at 128 tokens, 8 µs at 8,192 and at 131,072.
    """

    wants_hidden = False

    def __init__(self, lengths: Sequence[int] = LENGTHS) -> None:
        """Look for suffixes of `lengths` ids, the longest first."""
        longest_first = sorted(lengths, reverse=True)
        self._sources = {length: Source(f"ngram-{length}", length / (length + 2)) for length in longest_first}
        self.begin(())

    def begin(self, ids: Sequence[int]) -> None:
        """Begin an answer after `ids`, which are indexed piece by piece, the latest first, as the steps go on."""
        self._ids = list(ids)
        # For each length: where the latest occurrence of a run of ids ends, which is where what followed it stands.
        self._ends: dict[int, dict[tuple[int, ...], int]] = {length: {} for length in self._sources}
        self._unindexed = len(self._ids)  # runs that end before this index are not in `_ends` yet
        self._index_piece()
        self._match = self._longest()

    def saw(self, ids: Sequence[int], hidden: torch.Tensor | None) -> None:
        """Add `ids` to the sequence."""
        for token in ids:
            end = len(self._ids)
            for length, ends in self._ends.items():
                if length <= end:
                    ends[tuple(self._ids[end - length :])] = end
            self._ids.append(token)
        self._index_piece()
        self._match = self._longest()

    def source(self) -> Source | None:
        """Return the source for the longest suffix that occurred before, None when none did."""
        return None if self._match is None else self._sources[self._match[0]]

    def draft(self, count: int) -> Sequence[int]:
        """Return `count` ids that followed that suffix; a draft that reaches the sequence's end goes on with itself."""
        if self._match is None:
            return ()
        start = self._match[1]
        found, period = self._ids[start : start + count], len(self._ids) - start
        while len(found) < count:
            found.append(found[-period])
        return found

    def end(self) -> None:
        """Forget the sequence and its index."""
        self.begin(())

    def _longest(self) -> tuple[int, int] | None:
        """Return the length of the longest suffix that occurred before, and where its latest occurrence ends."""
        for length, ends in self._ends.items():
            if (end := ends.get(tuple(self._ids[-length:]))) is not None:
                return length, end
        return None

    def _index_piece(self) -> None:
        """Index the next piece of the prompt; what is indexed already stands later in the sequence, and stays."""
        stop = self._unindexed
        self._unindexed = max(0, stop - _PIECE)
        for length, ends in self._ends.items():
            first = max(self._unindexed, length)
            if first < stop:
                runs = zip(*(self._ids[first - length + nth : stop - length + nth] for nth in range(length)), strict=True)
                for run, end in dict(zip(runs, range(first, stop), strict=True)).items():
                    ends.setdefault(run, end)
