"""With speculation on, steps without drafts are queued ahead where none is to be expected; the answers stay what they are."""

from collections.abc import Iterator, Sequence

import pytest
import torch

from decode_daemon.engine.cuda.model import CudaModel
from decode_daemon.engine.drafts import Source
from decode_daemon.engine.loop import LlamaEngine
from decode_daemon.engine.policy import Policy, WidthCosts
from decode_daemon.engine.protocol import DecodeParams, SamplingParams
from decode_daemon.engine.speculation import Speculation
from tests.unit.engine.test_engine_cuda_model import VOCAB, FakeStep, follows, model  # noqa: F401 - `model` is a fixture

PROMPT = [5, 90, 3, 41]
FIRST = 7
Fake = tuple[CudaModel, FakeStep]


class Now:
    """Drafts two right tokens after as many tokens of the answer as a test names, and else has nothing to draft from."""

    def __init__(self, *when: int, wants_hidden: bool = False) -> None:
        self.when, self.wants_hidden = when, wants_hidden
        self.begin(())

    def begin(self, ids: Sequence[int]) -> None:
        self.ids, self.answered = list(ids), 1

    def saw(self, ids: Sequence[int], hidden: torch.Tensor | None) -> None:
        self.ids += ids
        self.answered += len(ids)

    def source(self) -> Source | None:
        return Source("now", 0.5) if self.answered in self.when else None

    def draft(self, count: int) -> Sequence[int]:
        position = len(self.ids) - 1
        first = follows(self.ids[-1], position)
        return [first, follows(first, position + 1)][:count]

    def end(self) -> None:
        """Nothing is kept that `begin` does not replace."""


class Eager(Policy):
    """Drafts whatever there is."""

    def length(self, source: Source, position: int, most: int) -> tuple[int, float]:
        return min(2, most), 2.0


def answer(fake: Fake, drafter: Now | None, tokens: int = 60) -> list[int]:
    cuda_model, step = fake
    cuda_model._step._x = torch.zeros(8, 16)
    speculation = None if drafter is None else Speculation(cuda_model, [drafter], Eager(WidthCosts([1.0] * 8)))
    engine = LlamaEngine(cuda_model, speculation)
    step.launched.clear()
    steps = engine.decode(PROMPT, FIRST, DecodeParams(SamplingParams(0.0), tokens, frozenset()), lambda: False)
    return [token for one in steps for token in one.ids]


def wanted(tokens: int = 60) -> Iterator[int]:
    token = FIRST
    for position in range(len(PROMPT), len(PROMPT) + tokens - 1):
        token = follows(token, position)
        yield token


@pytest.mark.parametrize("when", [(), (1,), (3, 4, 5), (30,), (17, 18, 19, 20), (16, 40, 41), tuple(range(60))])
def test_answers_are_those_without_speculation(model: Fake, when: tuple[int, ...]) -> None:  # noqa: F811
    assert answer(model, None) == list(wanted())
    assert answer(model, Now(*when)) == list(wanted())
    assert answer(model, Now(*when, wants_hidden=True)) == list(wanted())


def test_without_drafts_no_step_is_computed_twice_and_only_the_last_in_vain(model: Fake) -> None:  # noqa: F811
    answer(model, Now())
    positions = [position for _, position, _, _ in model[1].launched]
    assert positions == list(range(len(PROMPT), len(PROMPT) + 60))


def test_after_a_quiet_while_the_next_step_is_queued_before_a_token_is_known(model: Fake) -> None:  # noqa: F811
    cuda_model, step = model
    speculation = Speculation(cuda_model, [Now()], Eager(WidthCosts([1.0] * 8)))
    engine, launched = LlamaEngine(cuda_model, speculation), []
    step.launched.clear()
    for _ in engine.decode(PROMPT, FIRST, DecodeParams(SamplingParams(0.0), 40, frozenset()), lambda: False):
        launched.append(len(step.launched))
    assert launched[:15] == list(range(1, 16))
    assert launched[15:] == list(range(17, 41))


def test_a_draft_that_comes_while_its_step_is_under_way_waits_for_the_step_after(model: Fake) -> None:  # noqa: F811
    answer(model, Now(30, 31))
    tokens = [(len(ids), position) for ids, position, _, _ in model[1].launched]
    # The 30th token's successor was queued with the step before: its result is taken, nothing is queued ahead, and three rows
    # follow.
    at = len(PROMPT) + 30
    assert [(rows, position) for rows, position in tokens if at - 2 <= position < at + 4] == [
        (1, at - 2), (1, at - 1), (3, at), (1, at + 3)
    ]  # fmt: skip


def test_a_draft_head_never_has_a_step_queued_ahead_of_what_it_is_told(model: Fake) -> None:  # noqa: F811
    answer(model, Now(wants_hidden=True))
    assert len(model[1].launched) == 59


def test_a_step_after_a_step_of_one_row_needs_nothing_sent(model: Fake, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    fed: list[int] = []
    feed = CudaModel.feed

    def counted(self: CudaModel, ids: torch.Tensor, position: int) -> None:
        fed.append(position)
        feed(self, ids, position)

    monkeypatch.setattr(CudaModel, "feed", counted)
    assert answer(model, Now(8)) == list(wanted())
    at = len(PROMPT)
    assert fed == [at, at + 7, at + 10]  # the first, the draft's, and the one after it


def test_another_token_than_the_device_found_is_sent(model: Fake) -> None:  # noqa: F811
    cuda_model, step = model
    (best,) = cuda_model.bests([5], 30)
    assert best == follows(5, 30)
    other = (best + 1) % VOCAB
    assert cuda_model.bests([other], 31) == [follows(other, 31)]
    assert cuda_model.bests([9], 31) == [follows(9, 31)]
    step.broken = True
    assert cuda_model.bests([9], 32) == [None]
