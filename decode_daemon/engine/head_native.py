"""A draft head computed by the native step, which reads its matrices at the memory's speed with the step's own kind of threads.

What a head computes are steps of two models that have no attention to speak of. One has no layers: its only row of embedding is
what the head joins, its vocabulary the values of the joined state. The other takes that for its row of embedding; its layers
are the head's blocks, beside an attention whose output is zero, and its vocabulary the ids that the head can draft. The first
normalises what is joined once more, which changes nothing where every part has a root mean square of one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog
import torch

from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.cpu.build import BuildError, library
from decode_daemon.engine.cpu.cores import physical_cores, usable_cores
from decode_daemon.engine.cpu.native import INSTRUCTIONS, Library, NativeModel
from decode_daemon.engine.head import Drafting, Head, find
from decode_daemon.engine.protocol import EngineError
from decode_daemon.engine.steps import StepModel
from decode_daemon.engine.weights import LayerWeights, Weights

log = structlog.get_logger(__name__)

_LEAST = 16  # elements of an attention head; inner sizes are multiples of it
_PIECE = 4096  # rows of the embedding that are looked at at once


@dataclass(frozen=True, slots=True)
class Team:
    """What computes native steps, see `NativeModel`."""

    library: Library
    instructions: str
    threads: int
    pin: bool

    @classmethod
    def of(cls, threads: int | None, pin: bool, cache_dir: Path | None) -> "Team":
        """Return it for the settings of `choose_step`; raises BuildError where there is no native step."""
        loaded = Library(library(cache_dir))
        count = threads or usable_cores()
        instructions = loaded.instructions()
        if instructions is None:
            raise BuildError(f"this CPU has none of {', '.join(INSTRUCTIONS)}")
        return cls(loaded, instructions, count, pin and count == len(physical_cores()))


class NativeHead:
    """A `Drafting` on a CPU; see `Head`."""

    def __init__(self, head: Head, config: LlamaConfig, team: Team) -> None:
        """Compute `head`, of a model with `config`. Raises EngineError when the system refuses memory or threads."""
        self.states, self.tokens, self.belief, self.final_norm = head.states, head.tokens, head.belief, head.final_norm
        hidden, width = head.join.shape
        small = replace(
            config,
            heads=1,
            kv_heads=1,
            head_dim=_LEAST,
            max_positions=_LEAST,
            rope_scaling=None,
            tied=False,
            qkv_bias=False,
            qk_norm=False,
        )
        like, inner = head.final_norm, head.blocks[0][1].shape[1] if head.blocks else config.intermediate
        parts = like.new_zeros(1, width)
        self._join = _Products(
            replace(small, layers=0, hidden=width, vocab_size=hidden), Weights(parts, (), like.new_ones(width), head.join), team
        )
        self._rest = _Products(
            replace(small, layers=len(head.blocks), intermediate=inner, vocab_size=len(head.ids)),
            Weights(self._join.outputs.unsqueeze(0), tuple(map(_layer, head.blocks)), head.final_norm, head.rows),
            team,
        )
        self._head = head
        self._places = list(parts.view(-1, hidden))  # of the states and then the embeddings, the latest of each first
        squares = torch.cat([rows.float().square().mean(dim=1) for rows in torch.split(head.embedding, _PIECE)])
        self._scales: list[float] = (squares + head.eps).rsqrt().tolist()

    def drafts(self, states: Sequence[torch.Tensor], tokens: Sequence[int]) -> Iterator[tuple[int, float]]:
        """Yield tokens and how likely each is; see `Drafting.drafts`. NaN where the head's logits are not finite."""
        count, embedding = self.states, self._head.embedding
        for place, state in zip(self._places, states, strict=False):
            self._put_state(state.float(), place)
        for place, token in zip(self._places[count:], tokens, strict=True):
            torch.mul(embedding[token], self._scales[token], out=place)
        latest, said = self._places[0], self._places[count]
        while True:
            self._join.bests((0,), 0)
            (best,) = self._rest.bests((0,), 0)
            if best is None:
                yield 0, float("nan")
                return
            token = self._head.ids[best]
            yield token, float(self._rest.outputs.softmax(0, torch.float32)[best])
            for nth in (*range(count - 1, 0, -1), *range(len(self._places) - 1, count, -1)):
                self._places[nth].copy_(self._places[nth - 1])
            self._put_state(self._rest.state, latest)
            torch.mul(embedding[token], self._scales[token], out=said)

    def _put_state(self, state: torch.Tensor, place: torch.Tensor) -> None:
        scale = (float(state.dot(state)) / len(state) + self._head.eps) ** -0.5
        torch.mul(state, scale, out=place)


def head_for(
    model: StepModel,
    weights: Weights,
    named: Path | None = None,
    *,
    threads: int | None = None,
    pin: bool = True,
    cache_dir: Path | None = None,
) -> Drafting | None:
    """Return the draft head for `model`, computed as its steps are; None where there is none.

    `named` and what is raised: see `find`. The others are the settings that `choose_step` made `model` with.
    """
    found = find(named, weights, model.config.rms_eps, model.cache.device)
    if found is None or not isinstance(model, NativeModel):
        return found
    try:
        return NativeHead(found, model.config, Team.of(threads, pin, cache_dir))
    except (BuildError, EngineError) as error:
        if named is not None:
            raise EngineError(f"{named} cannot be used here: {error}") from error
        log.warning("the draft head is left out", error=str(error))  # answers need no drafts
        return None


class _Products(NativeModel):
    """Steps of one row, whose results are read where they lie."""

    def __init__(self, config: LlamaConfig, weights: Weights, team: Team) -> None:
        super().__init__(
            config,
            weights,
            _LEAST,
            library=team.library,
            instructions=team.instructions,
            threads=team.threads,
            pin=team.pin,
        )

    @property
    def outputs(self) -> torch.Tensor:
        """The last step's logits, [vocab]; the next step overwrites them."""
        return self._logits[0]

    @property
    def state(self) -> torch.Tensor:
        """The last step's row before the final norm, float32 [hidden]; the next step overwrites it."""
        return self._hidden[0]


def _layer(block: tuple[torch.Tensor, torch.Tensor]) -> LayerWeights:
    """Return a layer that adds a head's block, and zero for its attention."""
    gate_up, down = block
    hidden = down.shape[0]
    ones = down.new_ones(hidden)
    return LayerWeights(
        input_norm=ones,
        qkv=down.new_zeros(3 * _LEAST, hidden),
        qkv_bias=None,
        q_norm=None,
        k_norm=None,
        output=down.new_zeros(hidden, _LEAST),
        post_norm=ones,
        gate_up=gate_up,
        down=down,
    )
