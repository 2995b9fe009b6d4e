"""How long a draft is worth verifying: by how often its source was right, and by what a step of so many rows costs."""

import time
from collections.abc import Sequence
from itertools import accumulate, islice
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
        self._asked = [0.0] * longest  # drafts that might have had an n-th token
        self._given = [0.0] * longest  # those that had

    def judged(self, drafted: int, accepted: int, asked: int | None = None) -> None:
        """Take in one draft, the first `accepted` of whose `drafted` tokens were right.

        Where it might have had as many as `asked`, those that it had not count as not right. What is known of later tokens
        grows old, too: short drafts would else never find out that longer ones are right now.
        """
        asked = drafted if asked is None else asked
        self._weigh(_KEPT)
        for nth in range(min(asked, accepted + 1)):
            self._reached[nth] += 1
            self._right[nth] += nth < accepted
        for nth in range(asked):
            self._asked[nth] += 1
            self._given[nth] += nth < drafted

    def fade(self) -> None:
        """Let what was learned weigh less against what comes."""
        self._weigh(_CARRIED)

    def emitted(self) -> list[float]:
        """Return how many tokens a step is expected to emit with drafts of 0, 1, 2, ... tokens."""
        rates, rate = [], self._belief
        for reached, right in zip(self._reached, self._right, strict=True):
            # A token that was seldom reached is taken to be right as often as the one before it.
            rate = (right + _PRIOR * rate) / (reached + _PRIOR)
            rates.append(rate)
        return list(accumulate(accumulate(rates, mul), initial=1.0))

    def given(self) -> list[float]:
        """Return the share of drafts that had a first, a second, ... token of those that might have had it."""
        shares, share = [], 1.0
        for asked, given in zip(self._asked, self._given, strict=True):
            share = min(share, (given + _PRIOR * share) / (asked + _PRIOR))
            shares.append(share)
        return shares

    def _weigh(self, share: float) -> None:
        for weights in (self._reached, self._right, self._asked, self._given):
            weights[:] = [weight * share for weight in weights]


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

    @property
    def row_seconds(self) -> float:
        """What a step of one row takes of late."""
        return self._row_s

    def of(self, width: int, position: int) -> float:
        """Return the cost of a step of `width` rows at `position`."""
        table = self._table(position)
        return table[width - 1] / table[0]

    def between(self, width: float, position: int) -> float:
        """Return the cost of steps that have `width` rows on average."""
        below = int(width)
        least = self.of(below, position)
        return least if width == below else least + (width - below) * (self.of(below + 1, position) - least)

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
        hits = self._of(source)
        emitted, given = hits.emitted(), hits.given()
        rows = accumulate(given, initial=1.0)
        # The token that a drafter keeps to itself, since it may be wrong, was made, too.
        made = accumulate([1.0, *given[:-1]])
        times = [
            self.costs.between(width, position) + count * source.token_cost
            for width, count in zip(islice(rows, 1, longest + 1), made, strict=False)
        ]
        speeds = [tokens / taken for tokens, taken in zip(emitted[1:], times, strict=False)]
        speed = max(speeds)
        if speed <= 1.0:
            self._passed_over[source.name] = passed = self._passed_over.get(source.name, 0) + 1
            if passed < _TRY_EVERY:
                return 0, 1.0
        return speeds.index(speed) + 1, speed

    def judged(self, source: Source, drafted: int, accepted: int, *, asked: int | None = None) -> None:
        """Take in what became of a draft: its first `accepted` tokens were right, and a next one, if it had any, was not.

        `asked`: how many tokens it was to have, where the drafter gave fewer.
        """
        self._passed_over[source.name] = 0
        self._of(source).judged(drafted, accepted, asked)

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
