"""A draft head's file: whose it is, and that what is wrong with it is named."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from decode_daemon.engine.head import find
from decode_daemon.engine.headfile import HeadFile, fingerprint
from decode_daemon.engine.protocol import EngineError
from decode_daemon.engine.weights import load_weights
from tests.kit.heads import CPU, Made


def rewritten(path: Path, about: Mapping[str, str], tensors: Mapping[str, torch.Tensor] | None = None) -> None:
    """Change what the file says about itself, or what it holds."""
    file = HeadFile.read(path)
    whole = {"ids": file.ids, "join": file.join}
    for nth, block in enumerate(file.blocks):
        whole |= {f"blocks.{nth}.gate_up": block.gate_up, f"blocks.{nth}.down": block.down}
    known = {"version": "1", "model": file.model, "states": str(file.states), "acceptance": "[0.6]"}
    save_file(whole | dict(tensors or {}), path, known | dict(about))


def test_another_models_head_is_refused_by_name(made: Callable[..., Made]) -> None:
    it = made()
    own = fingerprint(it.weights)
    rewritten(it.path, {"model": "0123456789abcdef"})
    with pytest.raises(
        EngineError, match=f"{it.path} drafts for the model with weights 0123456789abcdef, this model's are {own}"
    ):
        find(it.path, it.weights, it.config.rms_eps, CPU)
    narrow = replace(it.weights, embedding=it.weights.embedding[:, :32])
    with pytest.raises(EngineError, match="hidden size 48, with ids up to 96; this model's hidden size is 32"):
        find(it.path, narrow, it.config.rms_eps, CPU)


@pytest.mark.parametrize(
    ("about", "told"),
    [
        ({"version": "2"}, "version is 2, this engine reads draft heads of version 1"),
        ({"acceptance": "none"}, "is no whole draft head"),
        ({"states": "5"}, "join \\[48, 240\\]"),
        ({"acceptance": "[1.5]"}, "acceptance \\(1.5,\\)"),
        ({"acceptance": "[NaN]"}, "acceptance \\(nan,\\)"),
        ({"acceptance": "[" * 100_000}, "is no whole draft head"),
        ({"acceptance": "[1" + "0" * 400 + "]"}, "is no whole draft head"),
    ],
    ids=str,
)
def test_a_damaged_head_is_refused_by_name(made: Callable[..., Made], about: dict[str, str], told: str) -> None:
    it = made()
    rewritten(it.path, about)
    with pytest.raises(EngineError, match=f"{it.path}.*{told}"):
        find(it.path, it.weights, it.config.rms_eps, CPU)
    it.path.write_bytes(b"no head")
    with pytest.raises(EngineError, match=f"{it.path} cannot be opened"):
        find(it.path, it.weights, it.config.rms_eps, CPU)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("join", torch.tensor(1.0)),
        ("join", torch.zeros(0, 48)),
        ("join", torch.zeros(48, 240, dtype=torch.int64)),
        ("blocks.0.down", torch.tensor(1.0)),
        ("blocks.0.down", torch.zeros(48, 0)),
        ("blocks.0.gate_up", torch.zeros(32, 32)),
        ("another", torch.zeros(2)),
    ],
)
def test_a_heads_tensor_that_does_not_fit_is_refused_by_name(
    made: Callable[..., Made], name: str, tensor: torch.Tensor
) -> None:
    it = made()
    rewritten(it.path, {}, {name: tensor})
    with pytest.raises(EngineError, match=f"{it.path}"):
        HeadFile.read(it.path)


def test_a_model_has_one_fingerprint_in_both_dtypes_and_another_one_when_a_weight_changes(made: Callable[..., Made]) -> None:
    it = made()
    assert fingerprint(load_weights(it.path.parent, it.config, torch.bfloat16)) == fingerprint(it.weights)
    for matrix in ("qkv", "output", "gate_up", "down"):
        own = fingerprint(it.weights)
        getattr(it.weights.layers[-1], matrix)[0, 3] += 1
        assert fingerprint(it.weights) != own, matrix


def test_no_head_is_found_for_a_model_that_none_was_made_for(made: Callable[..., Made]) -> None:
    it = made()
    assert find(None, it.weights, it.config.rms_eps, CPU) is None
