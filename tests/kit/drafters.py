"""Drafters that are right, wrong, or right for a while; and policies that draft as much as a test wants."""

from collections.abc import Sequence

import torch

from decode_daemon.engine.drafts import Drafter, Source
from decode_daemon.engine.policy import Policy, WidthCosts
from decode_daemon.engine.speculation import Speculation
from decode_daemon.engine.steps import StepModel


class Always(Policy):
    """Drafts so many tokens whenever it may."""

    def __init__(self, count: int) -> None:
        super().__init__(WidthCosts([1.0] * 8))
        self.count = count

    def length(self, source: Source, position: int, most: int) -> tuple[int, float]:
        return max(0, min(self.count, most)), 2.0


class Oracle:
    """Knows the answer after the first token; is wrong about each draft's tokens at the places `mistaken`."""

    wants_hidden = False

    def __init__(self, answer: Sequence[int], vocab_size: int, mistaken: Sequence[int] = (), name: str = "oracle") -> None:
        self.answer, self.vocab_size, self.mistaken, self.name = answer, vocab_size, mistaken, name
        self.seen = 0

    def begin(self, ids: Sequence[int]) -> None:
        self.seen = 0

    def saw(self, ids: Sequence[int], hidden: torch.Tensor | None) -> None:
        self.seen += len(ids)

    def source(self) -> Source | None:
        return Source(self.name, 0.5)

    def end(self) -> None:
        """Nothing of an answer is kept but what a test asks about."""

    def draft(self, count: int) -> Sequence[int]:
        drafted = [*self.answer[self.seen : self.seen + count]]
        drafted += [0] * (count - len(drafted))
        return [(token + (nth in self.mistaken)) % self.vocab_size for nth, token in enumerate(drafted)]


def always(model: StepModel, count: int, *drafters: Drafter) -> Speculation:
    """Speculation that verifies `count` tokens in each step, as far as the answer may still go."""
    return Speculation(model, drafters, Always(count))
