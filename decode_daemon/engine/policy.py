"""How long a draft is worth verifying: by how often its source was right, and by what a step of so many rows costs."""

import time
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from decode_daemon.engine.drafts import Source
from decode_daemon.engine.steps import StepModel

# Halving or doubling one of the first three changes SmolLM2's tokens per time by 2 % at most (chat, code and copies).
_PRIOR = 2.0  # drafts that a belief weighs as much as
_KEPT = 15 / 16  # of the weight of a draft when the next one of its source is judged
_CARRIED = 1 / 4  # of the weight of an answer's drafts in the next answer
_TRY_EVERY = 16  # where no draft is worth its cost, so many chances go by before one is tried
_PACE_WEIGHT = 1 / 2  # of a step in the pace, and in the cost of its width: geometric means
_COST_WEIGHT = 1 / 32
_SURPRISE = 2.0  # a step counts as at most so many times what was expected: a pause of the machine says nothing about widths
_ROUNDS = 5
_MEASURED_S = 2.0


class Hits:
    """How often a source's drafts were right, token by token, newer drafts weighing more."""

    def __init__(self, belief: float, longest: int) -> None:
        """Begin with `belief`, the share of tokens taken to be right, for drafts of up to `longest` tokens."""
        self._belief = belief
        self._reached = [0.0] * longest  # drafts of which the n-th token was judged: those before it were right
        self._right = [0.0] * longest

    def judged(self, drafted: int, accepted: int) -> None:
        """Take in one draft, the first `accepted` of whose `drafted` tokens were right.

        What is known of later tokens grows old, too: short drafts would else never find out that longer ones are right now.
        """
        self._reached = [weight * _KEPT for weight in self._reached]
        self._right = [weight * _KEPT for weight in self._right]
        for nth in range(min(drafted, accepted + 1)):
            self._reached[nth] += 1
            self._right[nth] += nth < accepted

    def fade(self) -> None:
        """Let what was learned weigh less against what comes."""
        self._reached = [weight * _CARRIED for weight in self._reached]
        self._right = [weight * _CARRIED for weight in self._right]

    def emitted(self) -> list[float]:
        """Return how many tokens a step is expected to emit with drafts of 0, 1, 2, ... tokens."""
        rates, rate = [], self._belief
        for reached, right in zip(self._reached, self._right, strict=True):
            # A token that was seldom reached is taken to be right as often as the one before it.
            rate = (right + _PRIOR * rate) / (reached + _PRIOR)
            rates.append(rate)
        return list(accumulate(accumulate(rates, mul), initial=1.0))


class WidthCosts:
    """What a step of each width costs, in steps of one row; learned from the steps, for each doubling of the context apart.

    Steps are compared with the pace of those just before: what slows all of them (another process, a longer context) is the
    pace's, and only what keeps slowing one width against the others is that width's.
    """

    def __init__(self, seconds: Sequence[float]) -> None:
        """Begin with the measured `seconds` of steps of 1, 2, ... rows."""
        self._row_s = seconds[0]  # of late
        self._measured = [took / seconds[0] for took in seconds]
        self._tables: dict[int, list[float]] = {}  # costs of the widths, by the position's number of bits

    @property
    def widest(self) -> int:
        """Rows of the widest step."""
        return len(self._measured)

    def of(self, width: int, position: int) -> float:
        """Return the cost of a step of `width` rows at `position`."""
        table = self._table(position)
        return table[width - 1] / table[0]

    def observe(self, width: int, position: int, seconds: float) -> None:
        """Take in one step."""
        table = self._table(position)
        surprise = min(max(seconds / (self._row_s * table[width - 1]), 1 / _SURPRISE), _SURPRISE)
        self._row_s *= surprise**_PACE_WEIGHT
        table[width - 1] *= surprise**_COST_WEIGHT

    def _table(self, position: int) -> list[float]:
        bits = position.bit_length()
        if bits not in self._tables:
            shorter = max((known for known in self._tables if known < bits), default=None)
            self._tables[bits] = list(self._measured if shorter is None else self._tables[shorter])
        return self._tables[bits]


class Policy:
    """Chooses the length of each draft; what it has learned of sources goes with it from answer to answer."""

    def __init__(self, costs: WidthCosts) -> None:
        self.costs = costs
        self._hits: dict[str, Hits] = {}
        self._passed_over: dict[str, int] = {}  # chances since a source's last draft

    def begin(self) -> None:
        """Begin an answer: the last ones' drafts are what it is expected to be like, until a few of its own are judged."""
        for hits in self._hits.values():
            hits.fade()

    def length(self, source: Source, position: int, most: int) -> tuple[int, float]:
        """Return how many tokens to draft from `source`, up to `most`, and the tokens expected in the time of a one-row step.

        The step's first row stands at `position`. Where no draft is worth its cost, the length is 0, but now and then the least
        bad one, to see whether it still is so.
        """
        longest = min(most, self.costs.widest - 1)
        if longest < 1:
            return 0, 1.0
        emitted = self._of(source).emitted()
        times = (self.costs.of(1 + count, position) + count * source.token_cost for count in range(1, longest + 1))
        speeds = [tokens / taken for tokens, taken in zip(emitted[1:], times, strict=False)]
        speed = max(speeds)
        if speed <= 1.0:
            self._passed_over[source.name] = passed = self._passed_over.get(source.name, 0) + 1
            if passed < _TRY_EVERY:
                return 0, 1.0
        return speeds.index(speed) + 1, speed

    def judged(self, source: Source, drafted: int, accepted: int) -> None:
        """Take in what became of a draft: its first `accepted` tokens were right, and a next one, if it had any, was not."""
        self._passed_over[source.name] = 0
        self._of(source).judged(drafted, accepted)

    def _of(self, source: Source) -> Hits:
        if source.name not in self._hits:
            self._hits[source.name] = Hits(source.belief, self.costs.widest - 1)
        return self._hits[source.name]


def measure(model: StepModel) -> list[float]:
    """Return the seconds that steps of 1, 2, ... `model.widest` rows take at the beginning of the context.

    The best of a few rounds; a large model takes two of them, however long. A wider step that seems faster was only disturbed
    less, and is taken to cost the same. The cache's first positions are overwritten.
    """
    widths = range(1, min(model.widest, model.context_tokens) + 1)
    best = [float("inf")] * len(widths)
    began = time.perf_counter()
    for done in range(_ROUNDS):
        if done >= 2 and time.perf_counter() - began > _MEASURED_S:
            break
        for width in widths:
            start = time.perf_counter()
            model.bests([0] * width, 0)
            best[width - 1] = min(best[width - 1], time.perf_counter() - start)
    return list(accumulate(best, max))
