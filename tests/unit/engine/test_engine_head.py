"""A draft head: whose it is, what it drafts, and that no answer depends on it."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import pytest
import torch

from benchmarks.head.network import Shape
from decode_daemon.engine.drafts import NgramDrafter
from decode_daemon.engine.head import Drafting, HeadDrafter
from decode_daemon.engine.head_native import NativeHead
from decode_daemon.engine.loop import LlamaEngine
from decode_daemon.engine.protocol import DecodeParams, EngineError, SamplingParams
from tests.kit.drafters import always
from tests.kit.heads import SHAPES, Made
from tests.kit.speculating import CONTEXT, answered, native_model, told

HIDDEN = 48
GREEDY = DecodeParams(SamplingParams(0.0), 40, frozenset())


def states(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(HIDDEN, generator=generator) * scale for scale in range(1, count + 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_program_drafts_what_the_trained_network_does(made: Callable[..., Made], shape: Shape) -> None:
    it, tokens = made(shape), [5, 90, 3][: shape.tokens]
    wanted = it.reference(states(shape.states), tokens, 12)
    assert len({token for token, _ in wanted}) > 3
    for head in it.heads():
        drafted = list(islice(head.drafts(states(shape.states), tokens), 12))
        assert [token for token, _ in drafted] == [token for token, _ in wanted]
        assert [likely for _, likely in drafted] == pytest.approx([likely for _, likely in wanted], rel=1e-3)


def test_in_bfloat16_the_first_token_is_the_same_where_the_head_is_sure(made: Callable[..., Made]) -> None:
    it, compared = made(SHAPES[0]), 0
    heads = it.heads(torch.bfloat16)
    for seed in range(60):
        state = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(seed))
        ((token, likely),) = it.reference([state], [seed], 1)
        if likely > 0.5:
            compared += 1
            assert {next(head.drafts([state.bfloat16()], [seed]))[0] for head in heads} == {token}
    assert compared > 10


class Scripted:
    """A `Drafting` of one state and two tokens that says what a test wants, and keeps what it was asked."""

    states, tokens, belief, final_norm = 2, 2, 0.5, torch.ones(4)

    def __init__(self, *said: tuple[int, float], error: Exception | None = None) -> None:
        self.said, self.error = said, error
        self.asked: list[tuple[list[float], list[int]]] = []

    def drafts(self, states: Sequence[torch.Tensor], tokens: Sequence[int]) -> Iterator[tuple[int, float]]:
        self.asked.append(([float(state[0]) for state in states], list(tokens)))
        yield from self.said
        if self.error is not None:
            raise self.error


def rows(*values: float) -> torch.Tensor:
    return torch.tensor(values).unsqueeze(1).expand(-1, 4)


def test_a_head_drafts_from_the_second_step_on_and_from_the_latest_states() -> None:
    head = Scripted((8, 1.0))
    drafter = HeadDrafter(head)
    drafter.begin([4, 5, 6])
    assert drafter.source() is None
    drafter.saw([7], rows(1.0))
    source = drafter.source()
    assert source is not None
    assert (source.name, source.belief) == ("head", 0.5)
    assert list(drafter.draft(1)) == [8]
    drafter.saw([8, 9, 10], rows(2.0, 3.0, 4.0))
    drafter.draft(1)
    drafter.saw([11], rows(5.0))
    drafter.draft(1)
    assert head.asked == [([1.0, 1.0], [7, 6]), ([4.0, 3.0], [10, 9]), ([5.0, 4.0], [11, 10])]


def test_nothing_of_an_answer_is_kept_for_the_next() -> None:
    drafter = HeadDrafter(head := Scripted((8, 1.0)))
    drafter.begin([4, 5])
    drafter.saw([7], rows(1.0))
    drafter.end()
    assert drafter.source() is None
    drafter.begin([3])
    assert drafter.source() is None
    drafter.saw([2], rows(9.0))
    drafter.draft(1)
    assert head.asked == [([9.0, 9.0], [2, 3])]


@pytest.mark.parametrize(
    ("likely", "drafted"),
    [
        ((1.0, 1.0, 1.0, 1.0), 3),  # three are asked for
        ((0.9, 0.3, 1.0), 2),  # worth a row, but not another token after it
        ((0.9, 0.2, 1.0), 1),
        ((0.15,), 0),
        ((float("nan"), 1.0), 0),
        ((1.0, float("nan"), 1.0), 1),
    ],
)
def test_a_head_drafts_as_far_as_it_is_sure(likely: tuple[float, ...], drafted: int) -> None:
    drafter = HeadDrafter(Scripted(*enumerate(likely)))
    drafter.saw([7], rows(1.0))
    assert list(drafter.draft(3)) == list(range(drafted))


@pytest.mark.parametrize(("row_seconds", "cheaper"), [(1e3, True), (1e-9, False)])
def test_what_a_drafted_token_costs_follows_what_drafts_take(row_seconds: float, cheaper: bool) -> None:
    drafter = HeadDrafter(Scripted((8, 1.0), (9, 1.0)), 0.1, lambda: row_seconds)
    drafter.saw([7], rows(1.0))
    costs = []
    for _ in range(20):
        drafter.draft(2)
        source = drafter.source()
        assert source is not None
        costs.append(source.token_cost)
    assert costs == sorted(costs, reverse=cheaper)
    assert costs[-1] == pytest.approx(0.1 * 2 ** (-20 / 16 if cheaper else 20 / 16))


def test_a_head_that_fails_is_not_asked_again() -> None:
    drafter = HeadDrafter(Scripted((8, 1.0), error=RuntimeError("out of memory")))
    drafter.saw([7], rows(1.0))
    assert drafter.wants_hidden
    assert list(drafter.draft(3)) == [8]
    assert drafter.source() is None
    assert not drafter.wants_hidden


class Sure:
    """A head that takes all it drafts to be right."""

    def __init__(self, head: Drafting) -> None:
        self.head = head
        self.states, self.tokens, self.belief, self.final_norm = head.states, head.tokens, head.belief, head.final_norm

    def drafts(self, states: Sequence[torch.Tensor], tokens: Sequence[int]) -> Iterator[tuple[int, float]]:
        for token, _ in self.head.drafts(states, tokens):
            yield token, 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("spoil", [1.0, float("nan")], ids=["random", "nan"])
def test_an_answer_is_the_same_with_and_without_a_head(made: Callable[..., Made], dtype: torch.dtype, spoil: float) -> None:
    it = made(spoil=spoil)
    model = native_model(it.path.parent, dtype, "avx2")
    prompt = [5, 90, 3, 41]
    plain = answered(LlamaEngine(model), prompt, GREEDY)
    for head in it.heads(dtype):
        answer, steps = told(LlamaEngine(model, always(model, 4, HeadDrafter(Sure(head)))), prompt, GREEDY)
        assert answer == plain
        assert steps[0].drafted == 0
        native_nan = spoil != spoil and isinstance(head, NativeHead)  # it sees that its logits are not finite
        assert native_nan or sum(step.drafted for step in steps) > 20


def test_an_engine_drafts_with_the_head_it_is_told_of(made: Callable[..., Made]) -> None:
    it = made()
    settings: dict[str, Any] = {"dtype": torch.float32, "context_tokens": CONTEXT, "threads": 1, "step": "native", "pin": False}
    plain = LlamaEngine.load(it.path.parent, **settings)
    drafting = LlamaEngine.load(it.path.parent, **settings, speculation="auto", draft_head=it.path)
    assert drafting._speculation is not None
    assert any(isinstance(drafter, HeadDrafter) for drafter in drafting._speculation._drafters)
    assert answered(drafting, [5, 6] * 10, GREEDY) == answered(plain, [5, 6] * 10, GREEDY)
    with pytest.raises(EngineError, match=f"speculation is ngram, which does not draft with {it.path}"):
        LlamaEngine.load(it.path.parent, **settings, speculation="ngram", draft_head=it.path)


def test_without_a_head_of_its_own_an_engine_looks_the_prompt_up(made: Callable[..., Made]) -> None:
    engine = LlamaEngine.load(
        made().path.parent, dtype=torch.float32, context_tokens=CONTEXT, threads=1, step="native", pin=False, speculation="auto"
    )
    assert engine._speculation is not None
    assert [type(drafter) for drafter in engine._speculation._drafters] == [NgramDrafter]
