"""The engine's pace: what a token has taken lately, and how long a number of tokens will take at that rate."""

import math

from leases.records import MAX_CAPACITY_TOKENS, MAX_TIME_MS

_WEIGHT = 1 / 16  # of a step in the mean: half of the mean is the last eleven steps
_UNMEASURED_S = 0.05


class Pace:
    """A running mean over the engine's steps, in seconds per token.

    The engine's thread observes and the event loop reads: one number, replaced as a whole.
    """

    def __init__(self) -> None:
        self._measured = False
        self.token_s = _UNMEASURED_S

    def observe(self, seconds: float, tokens: int) -> None:
        """Take in one step; one that made no token says nothing about the pace."""
        if tokens < 1:
            return
        taken = seconds / tokens
        self.token_s = self.token_s + (taken - self.token_s) * _WEIGHT if self._measured else taken
        self._measured = True

    def time_for_ms(self, tokens: int) -> int:
        """Return how long so many tokens take, rounded up to a millisecond: 0 for none, never above `MAX_TIME_MS`."""
        # Whole numbers beyond a float's range would raise; no slot holds as many tokens as the bound.
        return math.ceil(min(MAX_TIME_MS, 1000 * self.token_s * min(max(tokens, 0), MAX_CAPACITY_TOKENS)))
