import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks.head.network import Shape
from decode_daemon.engine.cpu.build import library
from decode_daemon.engine.loop import LlamaEngine
from tests.kit.heads import SHAPES, Made, make_head

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@pytest.fixture(scope="session")
def built_together(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The native library as two processes got it that started together and found none: built once for all tests."""
    folder = tmp_path_factory.mktemp("native")
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        return pool.map(library, [folder, folder])


@pytest.fixture(scope="session")
def native_cache(built_together: list[Path]) -> Path:
    """The cache folder in which it is."""
    return built_together[0].parent


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models are so tiny here that threads spend their time on waiting for each other, the more so beside other programs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., tuple[Path, Any]]:
    """Write a two-layer random model of a family; returns its folder and transformers' own float32 model of it."""

    def write(family: str = "Llama", max_shard_size: str = "1GB", **changes: Any) -> tuple[Path, Any]:
        config = getattr(transformers, f"{family}Config")(**SHAPE | changes)
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Wide enough that attention and norms matter: a default initialisation gives near-constant logits.
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + ("norm" in name))
        model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
        return tmp_path, model

    return write


@pytest.fixture
def tiny_engine(tiny: Callable[..., tuple[Path, Any]]) -> LlamaEngine:
    folder, _ = tiny()
    return LlamaEngine.load(folder, dtype=torch.float32, context_tokens=64, threads=None)


@pytest.fixture
def made(tiny: Callable[..., tuple[Path, Any]]) -> Callable[..., Made]:
    """Random heads of random models, see `tests.kit.heads`."""

    def make(shape: Shape = SHAPES[1], family: str = "Llama", spoil: float = 1.0) -> Made:
        return make_head(tiny, shape, family, spoil)

    return make
