"""Drafts from a trained head: a small network that goes on from the states the model chose its last tokens from.

It has no attention and keeps nothing of the prompt: the last few states and tokens are all it needs, so it drafts from an
answer's second step on, and nothing has to be taken back when a draft was wrong. In the manner of EAGLE (Li et al., 2024) it
feeds its own states back for the next token; `benchmarks/head` trains it.

    state = join [states, embeddings]      each normalised to a root mean square of one, the latest first
    state = state + down(silu(gate) * up)  for each block, of the normalised state
    logits = rows of the model's own head, after its final norm, for the ids that the head can draft
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Protocol

import structlog
import torch
from torch.nn import functional

from decode_daemon.engine import heads
from decode_daemon.engine.drafts import Source
from decode_daemon.engine.headfile import HeadFile, fingerprint, model_of
from decode_daemon.engine.protocol import EngineError
from decode_daemon.engine.weights import Weights

log = structlog.get_logger(__name__)

# Below which chance of being right a token is not worth a row of a step, and the next one not the head's time. Half as much or
# half as much again changes SmolLM2's tokens per time by 6 % at most (chat, code and copies).
_WORTH_A_ROW = 0.2
_GO_ON = 0.35
_ROUNDS = 5
_MEASURED_S = 2.0  # of rounds, unless two of them take longer
_SURPRISE = 2.0  # a draft counts as at most so many times what was expected
_COST_WEIGHT = 1 / 16  # of a draft in the cost of its tokens: a geometric mean
_TIMED = 2  # tokens of a draft whose time is taken


class Drafting(Protocol):
    """A draft head that is joined to its model."""

    @property
    def states(self) -> int:
        """How many of the last states it sees."""
        ...

    @property
    def tokens(self) -> int:
        """How many of the last tokens it sees."""
        ...

    @property
    def belief(self) -> float:
        """The share of its first tokens that were right when it was made."""
        ...

    @property
    def final_norm(self) -> torch.Tensor:
        """The model's, [hidden]: of the shape, dtype and device of a state."""
        ...

    def drafts(self, states: Sequence[torch.Tensor], tokens: Sequence[int]) -> Iterator[tuple[int, float]]:
        """Yield one likeliest token after another, and how likely the head takes each to be where those before it are right.

        It goes on from `states`, each [hidden], and `tokens`, as many as it sees and the latest first.
        """
        ...


@dataclass(frozen=True, slots=True)
class Head:
    """A draft head on the device and in the dtype of its model, computed by PyTorch."""

    join: torch.Tensor  # [hidden, (states + tokens) * hidden]
    states: int  # that it goes on from
    tokens: int
    blocks: tuple[tuple[torch.Tensor, torch.Tensor], ...]  # gate and up [2 * inner, hidden], down [hidden, inner]
    embedding: torch.Tensor  # [vocab, hidden], the model's own
    final_norm: torch.Tensor  # [hidden], the model's own
    rows: torch.Tensor  # [drafted, hidden]: those of `ids`, of the model's head
    ids: tuple[int, ...]
    belief: float  # share of first tokens that were right when it was made
    eps: float

    @classmethod
    def read(cls, path: Path, weights: Weights, eps: float, device: torch.device) -> "Head":
        """Read the head in `path` and join it to the model it was made for, on `device`.

        Raises EngineError, naming `path`, for a file that is damaged or another model's.
        """
        file = HeadFile.read(path)
        vocab, hidden = weights.embedding.shape
        if file.hidden != hidden or int(file.ids.max()) >= vocab:
            raise EngineError(
                f"{path} drafts for a model of hidden size {file.hidden}, with ids up to {int(file.ids.max())}; this model's "
                f"hidden size is {hidden}, its ids end at {vocab - 1}: name the head that was made for it, or none"
            )
        if (own := fingerprint(weights)) != file.model:
            raise EngineError(
                f"{path} drafts for the model with weights {file.model}, this model's are {own}: name the head that was made "
                "for it, or none"
            )
        dtype = weights.embedding.dtype
        return cls(
            join=file.join.to(device, dtype),
            states=file.states,
            tokens=file.tokens,
            blocks=tuple((block.gate_up.to(device, dtype), block.down.to(device, dtype)) for block in file.blocks),
            embedding=weights.embedding.to(device),
            final_norm=weights.final_norm.to(device),
            rows=weights.head[file.ids.long()].to(device),
            ids=tuple(file.ids.tolist()),
            belief=file.acceptance[0],
            eps=eps,
        )

    def drafts(self, states: Sequence[torch.Tensor], tokens: Sequence[int]) -> Iterator[tuple[int, float]]:
        """Yield tokens and how likely each is; see `Drafting.drafts`."""
        known = [self._normed(state) for state in states]
        words = [self._normed(self.embedding[token]) for token in tokens]
        while True:
            state = torch.mv(self.join, torch.cat((*known, *words)))
            for gate_up, down in self.blocks:
                gate, up = torch.mv(gate_up, self._normed(state)).chunk(2)
                state = torch.addmv(state, down, functional.silu(gate).mul_(up))
            logits = torch.mv(self.rows, functional.rms_norm(state, state.shape, self.final_norm, self.eps))
            most, place = logits.softmax(0, torch.float32).max(0)
            token = self.ids[int(place)]
            yield token, float(most)
            known = [self._normed(state), *known[:-1]]
            words = [self._normed(self.embedding[token]), *words[:-1]]

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, x.shape, None, self.eps)


def find(named: Path | None, weights: Weights, eps: float, device: torch.device) -> Head | None:
    """Return the head in the file `named`; without one, that of the engine's own which was made for this model, if any.

    On GPUs none is looked for: there the host would make drafts in the time of whole steps. Raises EngineError where the
    named one cannot be used.
    """
    if named is not None:
        return Head.read(named, weights, eps, device)
    if device.type != "cpu":
        return None
    own = fingerprint(weights)
    for path in sorted(Path(heads.__file__).parent.glob("*.safetensors")):
        try:
            if model_of(path) == own:
                return Head.read(path, weights, eps, device)
        except EngineError as error:  # of the installation: answers need no drafts
            log.warning("a draft head is left out", error=str(error))
    return None


class HeadDrafter:
    """Drafts what a head foretells, as far as it is sure enough of it; a `Drafter`.

    A token is drafted while the chance that it and those before it are right, as the head itself sees it, is worth a row.
    """

    def __init__(self, head: Drafting, token_cost: float = 0.0, row_seconds: Callable[[], float] | None = None) -> None:
        """Draft with `head`; a token costs `token_cost` steps of one row.

        Where `row_seconds` tells what such a step takes of late, the cost follows what drafts take: it may have been measured
        while the machine was busy.
        """
        self._head = head
        self._source: Source | None = Source("head", head.belief, token_cost)
        self._row_seconds = row_seconds
        self.begin(())

    @property
    def wants_hidden(self) -> bool:
        """Whether it drafts: not any more after it failed."""
        return self._source is not None

    def begin(self, ids: Sequence[int]) -> None:
        """Begin an answer after `ids`; the first states come with its first step."""
        self._states: list[torch.Tensor] = []  # the latest first
        self._tokens = list(reversed(ids[-self._head.tokens :]))
        self._tokens += [0] * (self._head.tokens - len(self._tokens))

    def saw(self, ids: Sequence[int], hidden: torch.Tensor | None) -> None:
        """Take in the `ids` of a step and the states they were chosen from, [len(ids), hidden]; without states it is silent."""
        if hidden is None or not ids:
            self._states = []
            return
        self._tokens = [*reversed(ids[-self._head.tokens :]), *self._tokens][: self._head.tokens]
        self._states = [*reversed(hidden.unbind()), *self._states][: self._head.states]
        # The prompt's states are not known: the oldest of the answer's stands for those before it.
        self._states += self._states[-1:] * (self._head.states - len(self._states))

    def source(self) -> Source | None:
        """Return the head as a source once an answer's first states are there; None after it failed."""
        return self._source if self._states else None

    @torch.inference_mode()
    def draft(self, count: int) -> Sequence[int]:
        """Return up to `count` ids, fewer or none where the head is not sure; a head that fails is not asked again."""
        drafted: list[int] = []
        chance, made, began = 1.0, 0, time.perf_counter()
        try:
            for token, likely in islice(self._head.drafts(self._states, self._tokens), count):
                made += 1
                chance *= likely
                if not chance > _WORTH_A_ROW:  # NaN is not
                    break
                drafted.append(token)
                if chance < _GO_ON:
                    break
        except RuntimeError as error:  # PyTorch's; an answer needs no draft
            log.warning("the draft head failed and is not used any more", error=str(error))
            self._source = None
        self._took(made, time.perf_counter() - began)
        return drafted

    def end(self) -> None:
        """Forget the answer."""
        self.begin(())

    def _took(self, made: int, seconds: float) -> None:
        """Let the cost follow what the `made` tokens of a draft took."""
        if self._source is None or self._row_seconds is None or not made or not self._source.token_cost:
            return
        surprise = seconds / made / (self._row_seconds() * self._source.token_cost)
        cost = self._source.token_cost * min(max(surprise, 1 / _SURPRISE), _SURPRISE) ** _COST_WEIGHT
        self._source = replace(self._source, token_cost=cost)


@torch.inference_mode()
def draft_seconds(head: Drafting, step: Callable[[], object]) -> float:
    """Return how long a drafted token takes, the best of a few that come after a `step` of the model, as they will be used.

    By then the step's weights are in the processor's caches and the head's are not.
    """
    best, end = float("inf"), time.perf_counter() + _MEASURED_S
    for done in range(_ROUNDS):
        if done >= 2 and time.perf_counter() > end:
            break
        step()
        began = time.perf_counter()
        for _ in islice(head.drafts([head.final_norm] * head.states, [0] * head.tokens), _TIMED):
            pass
        best = min(best, (time.perf_counter() - began) / _TIMED)
    return best
