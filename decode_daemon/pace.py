"""The engine's pace: what a token has taken lately, and how long a number of tokens will take at that rate."""

import math

from leases.records import MAX_CAPACITY_TOKENS, MAX_TIME_MS

_WEIGHT = 1 / 16  # of a step in the mean: half of the mean is the last eleven steps
_UNMEASURED_S = 0.05


class Pace:
    """The engine's pace over its last steps, in seconds per token.

    It is their mean time over their mean tokens: with speculation a step makes one token or several, and the mean of each
    step's own pace would be that of the slow ones. The engine's thread observes and the event loop reads: one number, replaced
    as a whole.
    """

    def __init__(self) -> None:
        self._step_s: float | None = None
        self._step_tokens = 1.0
        self.token_s = _UNMEASURED_S

    def observe(self, seconds: float, tokens: int) -> None:
        """Take in one step; one that made no token says nothing about the pace."""
        if tokens < 1:
            return
        if self._step_s is None:
            self._step_s, self._step_tokens = seconds, float(tokens)
        else:
            self._step_s += (seconds - self._step_s) * _WEIGHT
            self._step_tokens += (tokens - self._step_tokens) * _WEIGHT
        self.token_s = self._step_s / self._step_tokens

    def time_for_ms(self, tokens: int) -> int:
        """Return how long so many tokens take, rounded up to a millisecond: 0 for none, never above `MAX_TIME_MS`."""
        # Whole numbers beyond a float's range would raise; no slot holds as many tokens as the bound.
        return math.ceil(min(MAX_TIME_MS, 1000 * self.token_s * min(max(tokens, 0), MAX_CAPACITY_TOKENS)))
