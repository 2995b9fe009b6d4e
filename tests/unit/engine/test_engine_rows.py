"""A step of several rows tells of each what a step of that row alone tells, and leaves the states that its rows came from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.model import LlamaModel, rms_norm
from decode_daemon.engine.protocol import EngineError
from decode_daemon.engine.steps import StepModel
from decode_daemon.engine.weights import Weights, load_weights
from tests.kit.speculating import CONTEXT, VOCAB, native_model

IDS = [5, 90, 3, 41, 7, 62, 18, 2]

Made = tuple[StepModel, Weights]


@pytest.fixture(params=["torch", "native"])
def made(request: pytest.FixtureRequest, tiny: Callable[..., tuple[Path, Any]]) -> Made:
    folder, _ = tiny()
    if request.param == "native":
        native = native_model(folder, torch.float32, "avx2")
        return native, native._kept[0]
    config = LlamaConfig.read(folder)
    weights = load_weights(folder, config, torch.float32)
    return LlamaModel(config, weights, CONTEXT), weights


def test_each_row_has_the_best_id_that_it_has_alone(made: Made) -> None:
    model, _ = made
    alone = [model.greedy(token, position) for position, token in enumerate(IDS)]
    assert model.bests(IDS, 0) == alone
    assert model.bests(IDS[:3], 0) == alone[:3]


def test_the_states_of_the_last_step_give_its_logits(made: Made) -> None:
    model, weights = made
    logits = model.forward(torch.tensor(IDS), 0)
    hidden = model.hidden(len(IDS))
    model.forward(torch.tensor(IDS[:2]), len(IDS))
    assert hidden.shape == (len(IDS), model.config.hidden)
    again = rms_norm(hidden, weights.final_norm, model.config.rms_eps) @ weights.head.T
    torch.testing.assert_close(again, logits, rtol=1e-4, atol=1e-4)
    assert model.hidden(1).shape == (1, model.config.hidden)


def test_a_row_whose_logits_are_not_finite_has_no_best_id_and_the_others_have(made: Made) -> None:
    model, weights = made
    weights.embedding[VOCAB - 1] = torch.nan
    wanted = model.bests([5, 90], 0)
    assert model.bests([5, 90, VOCAB - 1, 3], 0) == [*wanted, None, None]


def test_a_row_outside_the_context_is_refused(made: Made) -> None:
    with pytest.raises(EngineError, match=f"context of {CONTEXT} tokens"):
        made[0].bests([1] * 3, CONTEXT - 2)
