"""The paged cache that the wire is measured with: its shape, its layout, and sums that tell whether all of it has landed."""

from dataclasses import dataclass

import torch

from handoff.layout import KVLayout, contiguous_block, uniform

BLOCKS = 1024  # of each layer
_BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Cache:
    """Of a model in bfloat16, `device` cpu or cuda; prompts have up to `context` tokens."""

    layers: int
    kv_heads: int
    head_dim: int
    device: str
    context: int

    @property
    def layout(self) -> KVLayout:
        """FlashAttention's order: K or V, token, head, dim."""
        block = contiguous_block(
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            block_tokens=_BLOCK_TOKENS,
            dtype="bfloat16",
            order=("kind", "token", "head", "dim"),
        )
        return uniform([f"layer.{index}" for index in range(self.layers)], block)

    @property
    def place(self) -> torch.device:
        """Where it lies."""
        return torch.device("cuda", 0) if self.device == "cuda" else torch.device("cpu")


def sums(content: torch.Tensor) -> list[int]:
    """Return two sums over 16-bit words, the second weighted by place: it differs for words that lie elsewhere."""
    words = content.view(torch.int16).to(torch.int64)
    places = torch.arange(words.numel(), device=words.device) % 65_521
    return [int(words.sum()), int((words * places).sum())]
