"""The draft head as it is trained: float32 parameters, many positions at once.

It has no attention: what it drafts from is the last few states that the model chose tokens from, and the embeddings of the last
few tokens. Its own states take the place of the model's from the second drafted token on. Gains of the norms are part of the
matrices behind them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from decode_daemon.engine.headfile import Block, HeadFile


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a head is."""

    states: int  # that it sees, the latest ones
    tokens: int
    inner: int  # of a block
    blocks: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """Read "2,2,1536,1", the fields in their order; raises ValueError."""
        return cls(*map(int, text.split(",")))

    def __str__(self) -> str:
        return f"{self.states},{self.tokens},{self.inner},{self.blocks}"


class Network(nn.Module):
    """A drafted token's state from the states and the tokens before it."""

    def __init__(self, hidden: int, shape: Shape, eps: float) -> None:
        super().__init__()
        self.shape, self.eps = shape, eps
        width = (shape.states + shape.tokens) * hidden
        self.join = nn.Parameter(torch.randn(hidden, width) * width**-0.5)
        self.gate_up = nn.ParameterList(torch.randn(2 * shape.inner, hidden) * hidden**-0.5 for _ in range(shape.blocks))
        self.down = nn.ParameterList(torch.zeros(hidden, shape.inner) for _ in range(shape.blocks))

    def forward(self, states: Sequence[torch.Tensor], tokens: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the states that follow, [positions, hidden].

        `states` and `tokens` (as embeddings) are as many as the shape says, the latest first, each [positions, hidden].
        """
        x = functional.linear(torch.cat([self._normed(part) for part in (*states, *tokens)], dim=-1), self.join)
        for gate_up, down in zip(self.gate_up, self.down, strict=True):
            gate, up = functional.linear(self._normed(x), gate_up).chunk(2, dim=-1)
            x = x + functional.linear(functional.silu(gate) * up, down)
        return x

    def file(self, model: str, ids: torch.Tensor, acceptance: Sequence[float]) -> HeadFile:
        """Return it as it is stored, in bfloat16."""
        blocks = tuple(
            Block(gate_up.detach().bfloat16(), down.detach().bfloat16())
            for gate_up, down in zip(self.gate_up, self.down, strict=True)
        )
        return HeadFile(model, ids.int(), self.join.detach().bfloat16(), self.shape.states, blocks, tuple(acceptance))

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], None, self.eps)
