"""RoPE's frequencies and magnitude are those that transformers computes."""

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from decode_daemon.engine.config import parse_config
from decode_daemon.engine.rope import rope_frequencies, rope_magnitude
from tests.unit.engine.test_engine_config import LLAMA, LLAMA3, YARN

HEAD_DIM = 64

scalings = pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 2.5},
        LLAMA3,
        YARN,
        YARN | {"original_max_position_embeddings": 4096, "factor": 32.0},
        YARN | {"beta_fast": 8, "beta_slow": 2, "truncate": False},
        YARN | {"beta_fast": 3, "beta_slow": 3, "truncate": False},
        YARN | {"attention_factor": 1.5},
        YARN | {"factor": 0.5},
    ],
    ids=["linear", "llama3", "yarn", "yarn long", "yarn betas", "yarn one beta", "yarn attention factor", "yarn shrunk"],
)


@scalings
@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
def test_frequencies_are_those_of_transformers(scaling: dict[str, Any], theta: float) -> None:
    rope = scaling | {"rope_theta": theta}
    config = parse_config(LLAMA | {"head_dim": HEAD_DIM, "rope_parameters": rope})
    reference = transformers.LlamaConfig(head_dim=HEAD_DIM, max_position_embeddings=512, rope_parameters=rope)
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[rope["rope_type"]](reference, "cpu")
    torch.testing.assert_close(rope_frequencies(config), frequencies, rtol=2e-6, atol=0)
    assert rope_magnitude(config) == pytest.approx(magnitude)
