"""How a draft head is made: a model's own chats, and a network that learns to foretell them."""

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.head.batch import Batch
from benchmarks.head.corpus import Chats, Corpus, Template, batches, joined
from benchmarks.head.network import Network, Shape
from benchmarks.head.training import LONGEST, Base, acceptance, expected, most_frequent, starts, trained, watched
from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.weights import Weights, load_weights

Tiny = Callable[..., tuple[Path, Any]]

ROWS, LENGTH = 24, 200
TEMPLATE = Template(opening=(1, 2), to_answer=(3, 4, 5), to_message=(3, 6), openings=((7, 8), (9,)))


@pytest.fixture(params=["Llama", "Qwen3"])
def model(tiny: Tiny, request: pytest.FixtureRequest) -> tuple[LlamaConfig, Weights, Any]:
    folder, reference = tiny(request.param)
    config = LlamaConfig.read(folder)
    return config, load_weights(folder, config, torch.float32), reference


def chats(config: LlamaConfig, weights: Weights, seed: int = 1) -> Chats:
    return Chats(Batch(config, weights, ROWS, LENGTH), TEMPLATE, ROWS, LENGTH, seed)


def test_the_states_are_those_of_transformers(model: tuple[LlamaConfig, Weights, Any]) -> None:
    config, weights, reference = model
    corpus = chats(config, weights).generate(0.5, lambda: False)
    with torch.no_grad():
        logits = reference(corpus.chats).logits
    batch = Batch(config, weights, 1, 1)
    ours = batch.logits(corpus.states).view(ROWS, LENGTH, -1)
    assert torch.allclose(ours[:, :-1], logits[:, :-1], atol=2e-3)
    best = corpus.best.view(ROWS, LENGTH)[:, 2:]
    assert (best == logits[:, 1:-1].argmax(-1)).float().mean() > 0.99  # near-ties apart


def test_turns_follow_each_other_in_the_templates_form(model: tuple[LlamaConfig, Weights, Any]) -> None:
    corpus = chats(*model[:2]).generate(1.0, lambda: False)
    chosen = corpus.chosen.view(ROWS, LENGTH)
    turns = 0
    for chat, own in zip(corpus.chats.tolist(), chosen.tolist(), strict=True):
        assert chat[:2] == [1, 2]
        ends = [place for place in range(2, LENGTH - 3) if chat[place] == 3]
        for nth, place in enumerate(ends):
            form = (3, 6) if nth % 2 else (3, 4, 5)
            assert tuple(chat[place : place + len(form)]) == form
            assert not any(own[place + 1 : place + len(form)])
        turns += len(ends)
        answers = [place for place in range(LENGTH) if own[place]]
        assert all(sum(end < place for end in ends) % 2 for place in answers)
    assert turns >= ROWS
    greedy = corpus.chosen
    assert torch.equal(corpus.ids[greedy], corpus.best[greedy])


def test_answers_to_prompts_are_greedy_and_end_where_they_end(model: tuple[LlamaConfig, Weights, Any]) -> None:
    config, weights, _ = model
    prompts = [[1, 2, 30 + row, 40, 3, 4, 5] for row in range(ROWS)]
    corpus = chats(config, weights).answers(prompts, 20)
    for chat, own, prompt in zip(corpus.chats.tolist(), corpus.chosen.view(ROWS, -1).tolist(), prompts, strict=True):
        assert chat[: len(prompt)] == prompt
        answer = chat[len(prompt) :]
        length = min(20, answer.index(3) + 1 if 3 in answer else LENGTH)
        assert [place for place, chose in enumerate(own) if chose] == list(range(len(prompt), len(prompt) + length))


def test_generating_ends_in_time(model: tuple[LlamaConfig, Weights, Any]) -> None:
    (only,) = batches(chats(*model[:2]), 0.0, 10**9, 1.0)
    assert only.length < LENGTH
    made = list(batches(chats(*model[:2]), 60.0, 2 * ROWS * LENGTH, 1.0))
    assert [len(batch.ids) for batch in made] == [ROWS * LENGTH] * 2


@pytest.fixture
def corpus(model: tuple[LlamaConfig, Weights, Any]) -> Corpus:
    made = chats(*model[:2])
    return joined([made.generate(1.0, lambda: False) for _ in range(4)])


def test_a_trained_network_foretells_what_the_model_says(model: tuple[LlamaConfig, Weights, Any], corpus: Corpus) -> None:
    config, weights, _ = model
    torch.manual_seed(3)
    base = Base.of(config, weights, most_frequent(corpus, config.vocab_size, 64))
    network = Network(config.hidden, Shape(2, 2, 64, 1), config.rms_eps)
    before = acceptance(network, base, corpus)
    kept: list[list[float]] = []
    steps = trained(network, base, corpus, seconds=20.0, unroll=3, batch=256, seed=1)
    watched(islice(steps, 200), lambda: acceptance(network, base, corpus, 500), kept.append)
    after = acceptance(network, base, corpus)
    assert len(after) == LONGEST
    assert after[0] > before[0] + 0.08  # the random Llama says much that only its attention can tell
    assert expected(after, 3) > expected(before, 3) + 0.1
    assert len(kept) == 1


def test_drafts_are_judged_only_inside_answers(corpus: Corpus) -> None:
    at = starts(corpus, 3)
    assert len(at) > 100
    assert bool((corpus.chosen[at + 1] & corpus.chosen[at + 2]).all())
    assert int(at.max()) + 3 + 1 < len(corpus.ids)


def test_the_ids_that_are_drafted_are_those_chosen_most_often(corpus: Corpus) -> None:
    ids = most_frequent(corpus, 97, 10)
    counts = torch.bincount(corpus.ids[corpus.chosen], minlength=97)
    assert ids.tolist() == sorted(ids.tolist())
    others = counts.clone()
    others[ids] = 0
    assert int(counts[ids].min()) >= int(others.max())
