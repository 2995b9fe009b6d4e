"""What each of several ranks holds of a model: some heads, some of the inner rows, some of the vocabulary.

Products whose outputs are cut (QKV, gate and up, head) need nothing from other ranks. Those whose inputs are cut (attention's
output, down) give a partial sum on each rank. Embedding and norms are whole everywhere.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.protocol import EngineError
from decode_daemon.engine.weights import LayerWeights, Weights

_WHOLE = frozenset({"embedding", "final_norm", "input_norm", "post_norm", "q_norm", "k_norm"})


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of rank `rank` of `ranks`, of the model whose shape is `whole`."""

    rank: int
    ranks: int
    whole: LlamaConfig

    @property
    def config(self) -> LlamaConfig:
        """The shape of this part; `vocab_size` is the number of ids whose logits it computes."""
        whole, ranks = self.whole, self.ranks
        return replace(
            whole,
            heads=whole.heads // ranks,
            kv_heads=whole.kv_heads // ranks,
            intermediate=whole.intermediate // ranks,
            vocab_size=self.ids.stop - self.ids.start,
        )

    @property
    def most_ids(self) -> int:
        """Ids of every rank but the last, which has the rest."""
        return -(-self.whole.vocab_size // self.ranks)

    @property
    def first_id(self) -> int:
        """The id that this part's first logit is of."""
        return self.rank * self.most_ids

    @property
    def ids(self) -> slice:
        """The ids whose logits this part computes."""
        return slice(self.first_id, min(self.first_id + self.most_ids, self.whole.vocab_size))

    @property
    def kv_heads(self) -> slice:
        """This part's KV heads among all."""
        count = self.whole.kv_heads // self.ranks
        return slice(self.rank * count, (self.rank + 1) * count)

    def cut(self, field: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return this part of the weights' `field`, a copy; `tensor` itself where every rank has the whole."""
        dim, config = self.whole.head_dim, self.whole
        if field in _WHOLE:
            return tensor
        if field in ("qkv", "qkv_bias"):
            kv = config.kv_heads * dim
            return torch.cat([self._rows(part) for part in torch.split(tensor, [config.heads * dim, kv, kv])])
        if field == "gate_up":
            return torch.cat([self._rows(part) for part in tensor.chunk(2)])
        if field == "head":
            return tensor[self.ids].clone()
        if field in ("output", "down"):
            count = tensor.shape[1] // self.ranks
            return tensor[:, self.rank * count : (self.rank + 1) * count].clone(memory_format=torch.contiguous_format)
        raise EngineError(
            f"tensor_parallel is {self.ranks}, and how ranks share the weights' {field} is not known: set it to 1"
        )

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        count = tensor.shape[0] // self.ranks
        return tensor[self.rank * count : (self.rank + 1) * count]


def check_divisible(config: LlamaConfig, ranks: int) -> None:
    """Raise EngineError, naming what does not divide, unless `ranks` can share a model of this shape."""
    for name in ("kv_heads", "heads", "intermediate"):
        if (count := getattr(config, name)) % ranks:
            raise EngineError(
                f"tensor_parallel is {ranks}, which does not divide the model's {name} ({count}): choose a divisor"
            )
    if Shard(ranks - 1, ranks, config).config.vocab_size < 1:
        raise EngineError(f"tensor_parallel is {ranks}, too many for a vocabulary of {config.vocab_size}: choose fewer")


def named(weights: Weights) -> Iterator[tuple[int | None, str, torch.Tensor]]:
    """Yield (layer or None, field, tensor) of all weights, in one order everywhere; not the head where it is the embedding."""
    yield None, "embedding", weights.embedding
    for index, layer in enumerate(weights.layers):
        for field in LayerWeights.__dataclass_fields__:
            tensor = getattr(layer, field)
            if tensor is not None:
                yield index, field, tensor
    yield None, "final_norm", weights.final_norm
    if weights.head is not weights.embedding:
        yield None, "head", weights.head


def assembled(parts: dict[tuple[int | None, str], torch.Tensor], shard: Shard) -> Weights:
    """Return one rank's weights from its parts of what `named` yields; a tied head is a part of the embedding's memory."""

    def layer(index: int) -> LayerWeights:
        fields = {field: parts.get((index, field)) for field in LayerWeights.__dataclass_fields__}
        return LayerWeights(**fields)  # type: ignore[arg-type]

    embedding = parts[None, "embedding"]
    head = parts.get((None, "head"))
    return Weights(
        embedding=embedding,
        layers=tuple(map(layer, range(shard.whole.layers))),
        final_norm=parts[None, "final_norm"],
        head=embedding[shard.ids] if head is None else head,
    )
