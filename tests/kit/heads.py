"""A random draft head of a random model, and what it drafts as it was trained."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.head.network import Network, Shape
from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.cpu.build import library
from decode_daemon.engine.cpu.native import INSTRUCTIONS, Library
from decode_daemon.engine.head import Drafting, Head
from decode_daemon.engine.head_native import NativeHead, Team
from decode_daemon.engine.headfile import fingerprint
from decode_daemon.engine.model import rms_norm
from decode_daemon.engine.weights import Weights, load_weights
from tests.kit.speculating import VOCAB

CPU = torch.device("cpu")
DRAFTED = torch.arange(0, VOCAB, 2)
SHAPES = [Shape(1, 1, 32, 1), Shape(2, 3, 16, 2), Shape(3, 2, 64, 0)]


@dataclass(frozen=True)
class Made:
    """A random head of a random model."""

    network: Network
    path: Path
    config: LlamaConfig
    weights: Weights

    def heads(self, dtype: torch.dtype = torch.float32) -> list[Drafting]:
        """The head as each of its programs computes it."""
        weights = load_weights(self.path.parent, self.config, dtype)
        plain = Head.read(self.path, weights, self.config.rms_eps, CPU)
        loaded = Library(library())
        teams = [Team(loaded, name, 1, False) for name in INSTRUCTIONS if loaded.supports(name.encode())]
        return [plain, *(NativeHead(plain, self.config, team) for team in teams)]

    def reference(self, states: Sequence[torch.Tensor], tokens: Sequence[int], count: int) -> list[tuple[int, float]]:
        """What the network as it was trained drafts: everything in float32, all of it anew for each token."""
        known, said, drafted = list(states), list(tokens), []
        for _ in range(count):
            state = self.network(
                [one.unsqueeze(0) for one in known[: self.network.shape.states]],
                [self.weights.embedding[token].unsqueeze(0) for token in said[: self.network.shape.tokens]],
            )[0]
            logits = self.weights.head[DRAFTED] @ rms_norm(state, self.weights.final_norm, self.config.rms_eps)
            best = int(logits.argmax())
            drafted.append((int(DRAFTED[best]), float(logits.softmax(0)[best])))
            known, said = [state, *known], [drafted[-1][0], *said]
        return drafted


def make_head(tiny: Callable[..., tuple[Path, Any]], shape: Shape, family: str, spoil: float) -> Made:
    """Write a random head of `shape` for a tiny model of `family`; `spoil` is what its parameters are multiplied by."""
    folder, _ = tiny(family)
    config = LlamaConfig.read(folder)
    weights = load_weights(folder, config, torch.float32)
    torch.manual_seed(4)
    network = Network(config.hidden, shape, config.rms_eps).requires_grad_(False)
    for down in network.down:
        down.normal_(0, 0.3)
    for parameter in network.parameters():
        parameter.copy_((parameter * spoil).bfloat16())  # as it is stored
    path = folder / "head"
    network.file(fingerprint(weights), DRAFTED, [0.6, 0.5]).save(path)
    return Made(network, path, config, weights)
