"""Trains a draft head along its own states: each of several drafted tokens in a row counts, as it will be used.

The targets are half the model's likeliest token and half its distribution over the ids that the head can draft. As in EAGLE-3
(Li et al., 2025) later tokens weigh less: those before them must be right first.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from time import perf_counter

import torch
from torch.nn import functional

from benchmarks.head.corpus import Corpus
from benchmarks.head.network import Network
from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.model import rms_norm
from decode_daemon.engine.weights import Weights

LONGEST = 7  # drafted tokens that are measured

_LATER = 0.8  # weight of each drafted token over the one before
_HARD = 0.5  # share of the likeliest token in the target
_RATE = 1.5e-3
_WARM = 0.03  # share of the time in which the rate rises
_REPORT_S = 5.0
_MEASURE_S = 20.0
_CHUNK = 4096


@dataclass(frozen=True, slots=True)
class Base:
    """What a head has from its model."""

    embedding: torch.Tensor  # [vocab, hidden]
    norm: torch.Tensor  # [hidden]
    rows: torch.Tensor  # [drafted, hidden]: of the vocabulary's head
    ids: torch.Tensor  # int64 [drafted]
    place: torch.Tensor  # int64 [vocab]: where an id is in `ids`, -1 where it is not
    eps: float

    @classmethod
    def of(cls, config: LlamaConfig, weights: Weights, ids: torch.Tensor) -> "Base":
        """Return it for a head that drafts `ids`."""
        place = torch.full((config.vocab_size,), -1, device=ids.device)
        place[ids] = torch.arange(len(ids), device=ids.device)
        return cls(weights.embedding, weights.final_norm, weights.head[ids], ids, place, config.rms_eps)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits of `ids` after states [positions, hidden]."""
        return functional.linear(rms_norm(states.to(self.norm.dtype), self.norm, self.eps), self.rows)


def most_frequent(corpus: Corpus, vocab: int, count: int) -> torch.Tensor:
    """Return the `count` ids, ascending, that the model chose most often; of those it never chose, the lowest."""
    seen = torch.bincount(corpus.ids[corpus.chosen], minlength=vocab)
    return seen.sort(descending=True, stable=True).indices[:count].sort().values


def coverage(corpus: Corpus, ids: torch.Tensor, vocab: int) -> float:
    """Return the share of the answers' tokens that are among `ids`."""
    known = torch.zeros(vocab, dtype=torch.bool, device=ids.device)
    known[ids] = True
    return float(known[corpus.ids[corpus.chosen]].float().mean())


def starts(corpus: Corpus, longest: int) -> torch.Tensor:
    """Return the positions from whose states a draft can be judged: the two ids that follow were chosen for an answer."""
    follows = corpus.chosen[1:-1] & corpus.chosen[2:]
    return follows[: len(corpus.ids) - longest - 2].nonzero().squeeze(1)


def trained(
    network: Network, base: Base, corpus: Corpus, *, seconds: float, unroll: int, batch: int, seed: int
) -> Iterator[tuple[float, torch.Tensor]]:
    """Train `network` for `seconds`, a step for each item: the share of the time that is over, and the loss."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    at = starts(corpus, unroll)
    random = torch.Generator(at.device).manual_seed(seed)
    began, order, used = perf_counter(), at[:0], 0
    while (over := (perf_counter() - began) / seconds) < 1:
        if used + batch > len(order):
            order, used = at[torch.randperm(len(at), generator=random, device=at.device)], 0
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min(1.0, over / _WARM) * (0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * over)))
        loss = _loss(network, base, corpus, order[used : used + batch], unroll)
        used += batch
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        yield over, loss.detach()


def _loss(network: Network, base: Base, corpus: Corpus, at: torch.Tensor, unroll: int) -> torch.Tensor:
    """Return the mean loss of drafts of `unroll` tokens from the states at `at`."""
    total = torch.zeros((), device=at.device)
    alive = torch.ones_like(at, dtype=torch.bool)
    for nth, state in zip(range(unroll), _drafted(network, base, corpus, at), strict=False):
        with torch.autocast(at.device.type, dtype=torch.bfloat16):
            drafted = base.logits(state).float()
            with torch.no_grad():
                wanted = base.logits(corpus.states[at + 1 + nth]).float().softmax(-1)
        alive = alive & corpus.chosen[at + 2 + nth]
        likeliest = base.place[corpus.best[at + 2 + nth]]
        known = alive & (likeliest >= 0)
        hit = drafted.gather(1, likeliest.clamp(min=0).unsqueeze(1)).squeeze(1)
        each = drafted.logsumexp(-1) - _HARD * hit - (1 - _HARD) * (wanted * drafted).sum(-1)
        total = total + _LATER**nth * (each * known).sum() / len(at)
    return total


def _drafted(network: Network, base: Base, corpus: Corpus, at: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the states of one drafted token after another, [len(at), hidden], where the tokens are the corpus' own.

    The model's states are known up to `at`; the head's own follow.
    """
    states = [corpus.states[(at - back).clamp(min=0)] for back in range(network.shape.states)]
    for nth in count():
        tokens = [base.embedding[corpus.ids[at + 1 + nth - back]] for back in range(network.shape.tokens)]
        with torch.autocast(at.device.type, dtype=torch.bfloat16):
            state = network(states, tokens)
        states = [state, *states[:-1]]
        yield state


@torch.inference_mode()
def acceptance(network: Network, base: Base, corpus: Corpus, limit: int | None = None) -> list[float]:
    """Return how often the n-th drafted token is right where those before it are, n from 1 to LONGEST.

    Drafts begin at every position of the greedy answers in `corpus`, or at `limit` of them, evenly spread.
    """
    at = starts(corpus, LONGEST)
    if limit is not None and len(at) > limit:
        at = at[:: len(at) // limit]
    judged, right = torch.zeros(2, LONGEST, device=at.device)
    for part in torch.split(at, _CHUNK):
        alive = torch.ones_like(part, dtype=torch.bool)
        for nth, state in zip(range(LONGEST), _drafted(network, base, corpus, part), strict=False):
            drafted = base.ids[base.logits(state).argmax(-1)]
            alive = alive & corpus.chosen[part + 2 + nth]
            judged[nth] += alive.sum()
            alive = alive & (drafted == corpus.ids[part + 2 + nth])
            right[nth] += alive.sum()
    return [float(rate) for rate in right / judged.clamp(min=1)]


def expected(rates: list[float], length: int) -> float:
    """Return the tokens of a step that verifies `length` drafted ones, at the acceptance `rates`."""
    return 1 + sum(math.prod(rates[: nth + 1]) for nth in range(length))


def watched(
    steps: Iterator[tuple[float, torch.Tensor]], measure: Callable[[], list[float]], keep: Callable[[list[float]], None]
) -> list[float]:
    """Run the training `steps`; print the loss, `measure` now and then and at the end, and `keep` what is the best so far."""
    reported = measured = perf_counter()
    best: list[float] = []

    def look() -> None:
        nonlocal best
        rates = measure()
        print(f"  acceptance {told(rates)}", flush=True)
        if not best or expected(rates, LONGEST) > expected(best, LONGEST):
            best = rates
            keep(rates)

    for done, (over, loss) in enumerate(steps):
        if not done or perf_counter() - reported > _REPORT_S:
            print(f"step {done}, {over:.0%} of the time, loss {float(loss):.3f}", flush=True)
            reported = perf_counter()
        if perf_counter() - measured > _MEASURE_S:
            look()
            measured = perf_counter()
    look()
    return best


def told(rates: list[float]) -> str:
    """Return the rates by position, and what a step of a few drafted tokens is expected to make of them."""
    steps = ", ".join(f"{length}: {expected(rates, length):.2f}" for length in (1, 2, 3, 4, 5, 7))
    return f"{' '.join(f'{rate:.3f}' for rate in rates)}; tokens a step by drafted ones {steps}"
