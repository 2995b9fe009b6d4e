"""Speculation along one answer at a time: asks the drafters, follows the policy, and tells both what became of a draft."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Literal, Protocol, runtime_checkable

import structlog

from decode_daemon.engine.acceptance import Verdict
from decode_daemon.engine.drafts import Drafter, NgramDrafter, Source
from decode_daemon.engine.head import Drafting, HeadDrafter, draft_seconds
from decode_daemon.engine.policy import Policy, WidthCosts, measure
from decode_daemon.engine.steps import StepModel

log = structlog.get_logger(__name__)

SpeculationKind = Literal["off", "ngram", "auto"]

# Steps in a row for which no draft was worth its cost, after which the next is taken to have none either. Wrong, that costs a
# step of one token where more had been drafted; right, it saves the host's part of a step, a few percent of it.
_QUIET = 16


@runtime_checkable
class QueuesAhead(Protocol):
    """A `StepModel` whose `greedy` queues the step that follows before its own result is known."""

    def under_way(self, token: int, position: int) -> bool:
        """Tell if the step of `token` at `position` is queued already; `bests` of that one id then takes its result."""
        ...


@dataclass(frozen=True, slots=True)
class Draft:
    """The ids that a step verifies beside the one it must compute anyway."""

    ids: tuple[int, ...] = ()
    source: Source | None = None
    asked: int = 0  # how many ids the source might have given


class Speculation:
    """What one engine drafts with: `begin` each answer; for each step `draft`, then `took` and `saw`."""

    def __init__(self, model: StepModel, drafters: Sequence[Drafter], policy: Policy) -> None:
        """Draft with the best of `drafters` at each step, of equally good ones with the first."""
        self._model = model
        self._drafters = tuple(drafters)
        self._queueing = model if isinstance(model, QueuesAhead) else None
        self._policy = policy
        self._quiet = 0  # steps in a row without a draft that was worth its cost
        self._waiting = False  # whether a draft was wanted while its step's first row was under way

    @classmethod
    def of(cls, kind: SpeculationKind, model: StepModel, head: Drafting | None = None) -> "Speculation | None":
        """Return what `kind` names; None for "off", and for a `model` whose rows are not those of single steps.

        With `head` it drafts, too, where `kind` is "auto". Measures what the model's steps and the head cost, which overwrites
        the first positions of the cache.
        """
        if kind == "off":
            return None
        if model.widest == 1:
            log.info("speculation", drafts="off", why="rows of this step are not bit for bit those of single steps")
            return None
        seconds = measure(model)
        costs = WidthCosts(seconds)
        drafters: list[Drafter] = [NgramDrafter()]
        draft_ms = None
        if kind == "auto" and head is not None:
            took = draft_seconds(head, lambda: model.bests((0,), 0))
            drafters.append(HeadDrafter(head, took / seconds[0], lambda: costs.row_seconds))
            draft_ms = round(1000 * took, 2)
        step_ms = [round(1000 * took, 2) for took in seconds]
        log.info("speculation", drafts="ngram" if draft_ms is None else "ngram and head", step_ms=step_ms, draft_ms=draft_ms)
        return cls(model, drafters, Policy(costs))

    def begin(self, ids: Sequence[int]) -> None:
        """Begin an answer after `ids`: the prompt and the answer so far, whose last id no step has seen."""
        self._policy.begin()
        self._quiet, self._waiting = 0, False
        for drafter in self._drafters:
            drafter.begin(ids)

    def end(self) -> None:
        """Forget the last answer's tokens: an index of a long context is large."""
        for drafter in self._drafters:
            drafter.end()

    @property
    def _hidden(self) -> bool:
        return any(drafter.wants_hidden for drafter in self._drafters)

    @property
    def _queue(self) -> QueuesAhead | None:
        """The model where it queues ahead: what a head continues from is the last step's, whose place the next one takes."""
        return None if self._hidden else self._queueing

    @property
    def quiet(self) -> bool:
        """Whether the model may queue the step after this one, which has no draft, before this one's token is known."""
        return self._queue is not None and self._quiet >= _QUIET and not self._waiting

    def draft(self, token: int, position: int, most: int) -> Draft:
        """Return what the step of `token` at `position` should verify beside it: at most `most` ids, often none.

        None where that step is under way without a draft: its token comes sooner than a wider step's.
        """
        best, length, best_speed = None, 0, 0.0
        for drafter in self._drafters:
            source = drafter.source()
            if source is None:
                continue
            count, speed = self._policy.length(source, position, most)
            if count and speed > best_speed:
                best, length, best_speed = (drafter, source), count, speed
        self._quiet = 0 if best_speed > 1.0 else self._quiet + 1
        self._waiting = best is not None and self._queue is not None and self._queue.under_way(token, position)
        if best is None or self._waiting:
            return Draft()
        drafter, source = best
        vocab = self._model.config.vocab_size
        # A drafter may be a model of its own: whatever it says, a draft costs time and nothing else.
        sound = takewhile(lambda token: 0 <= token < vocab, drafter.draft(length))
        return Draft(tuple(islice(sound, length)), source, length)

    def took(self, width: int, position: int, seconds: float) -> None:
        """Take in how long the model's step of `width` rows took; not needed where that is not known."""
        self._policy.costs.observe(width, position, seconds)

    def saw(self, draft: Draft, verdict: Verdict) -> None:
        """Take in what became of the last step, whose rows the model still has; not needed after an answer's last step."""
        if draft.source is not None:
            self._policy.judged(draft.source, len(draft.ids), verdict.accepted, asked=draft.asked)
        hidden = self._model.hidden(len(verdict.ids)) if self._hidden else None
        for drafter in self._drafters:
            drafter.saw(verdict.ids, hidden)
