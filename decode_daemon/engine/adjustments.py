"""What a request changes in the logits before a token is chosen: ids withheld, biased, penalised.

Each adjustment edits float32 logits [vocab] in place, on vLLM's terms, bit for bit: v1/sample/ops/bad_words.py,
v1/sample/logits_processor/builtin.py, model_executor/layers/utils.py. Tensors are made once for a request; a step costs a
few passes over the vocabulary at most.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch

from decode_daemon.engine.protocol import SamplingParams


class Adjustment(Protocol):
    """One change to the logits of the id that follows `answer`, the tokens of the whole answer so far."""

    def apply(self, logits: torch.Tensor, answer: Sequence[int]) -> None:
        """Edit `logits` in place; the same answer, or a longer one, may follow."""
        ...


class AllowedIds:
    """Withholds every id but the allowed ones."""

    def __init__(self, ids: Sequence[int], vocab_size: int, device: torch.device) -> None:
        self._withheld = torch.full((vocab_size,), -math.inf, device=device)
        self._withheld[torch.tensor(ids, device=device)] = 0.0

    def apply(self, logits: torch.Tensor, answer: Sequence[int]) -> None:
        """Withhold all other ids."""
        logits += self._withheld


class BadWords:
    """Withholds the last id of a sequence where the answer, not the prompt, ends with the others."""

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        self._always: list[int] = []
        # Filed under the id before the last one: a step looks only at the sequences its latest token may continue.
        self._after: dict[int, list[tuple[list[int], int]]] = defaultdict(list)
        for *before, last in sequences:
            if before:
                self._after[before[-1]].append((before, last))
            else:
                self._always.append(last)

    def apply(self, logits: torch.Tensor, answer: Sequence[int]) -> None:
        """Withhold the ids that would complete a sequence."""
        withheld = list(self._always)
        if answer:
            continued = self._after.get(answer[-1], ())
            withheld += [last for before, last in continued if list(answer[-len(before) :]) == before]
        if withheld:
            logits[torch.tensor(withheld, device=logits.device)] = -math.inf


class MinTokens:
    """Withholds the ids that would end an answer; to be dropped once the answer is long enough."""

    def __init__(self, ids: Iterable[int], device: torch.device, *, constrained: bool) -> None:
        self._ids = torch.tensor(sorted(ids), device=device)
        self._constrained = constrained

    def apply(self, logits: torch.Tensor, answer: Sequence[int]) -> None:
        """Withhold the ending ids, unless a constraint leaves no other: what has to match must be allowed to end."""
        before = logits[self._ids]
        logits[self._ids] = -math.inf
        if self._constrained and logits.max() == -math.inf:
            logits[self._ids] = before


class Bias:
    """Adds to the logits of some ids."""

    def __init__(self, bias: Mapping[int, float], device: torch.device) -> None:
        self._ids = torch.tensor(list(bias.keys()), device=device)
        self._values = torch.tensor(list(bias.values()), dtype=torch.float32, device=device)

    def apply(self, logits: torch.Tensor, answer: Sequence[int]) -> None:
        """Add the biases."""
        logits[self._ids] += self._values


class Repetition:
    """Divides the positive logits, and multiplies the others, of ids that the prompt or the answer has."""

    def __init__(self, penalty: float, vocab_size: int, prompt_ids: Sequence[int], device: torch.device) -> None:
        self._factor = torch.tensor(penalty, dtype=torch.float32, device=device)
        self._positive = torch.ones(vocab_size, device=device)  # what a positive logit is multiplied by
        self._other = torch.ones(vocab_size, device=device)
        self._answered = 0
        self._saw(prompt_ids)

    def apply(self, logits: torch.Tensor, answer: Sequence[int]) -> None:
        """Scale the logits; NaN where the penalty or its inverse is no float32."""
        self._saw(answer[self._answered :])
        self._answered = len(answer)
        # One of the two is zero: on a CPU their sum takes an eighth of the time of choosing by sign.
        others = logits.clamp(max=0).mul_(self._other)
        logits.clamp_(min=0).mul_(self._positive).add_(others)

    def _saw(self, ids: Sequence[int]) -> None:
        if ids:
            seen = torch.tensor(ids, device=self._factor.device)
            self._positive[seen] = 1.0 / self._factor  # vLLM multiplies by the float32 inverse: a division may round otherwise
            self._other[seen] = self._factor


class Occurrences:
    """Lowers logits by how often the answer has their ids (frequency), and by whether it has them at all (presence)."""

    def __init__(self, frequency: float, presence: float, vocab_size: int, device: torch.device) -> None:
        self._frequency, self._presence = frequency, presence
        self._counts = torch.zeros(vocab_size, device=device)
        self._frequent = torch.zeros(vocab_size, device=device)  # what the frequency takes from each logit
        self._present = torch.zeros(vocab_size, device=device)
        self._answered = 0

    def apply(self, logits: torch.Tensor, answer: Sequence[int]) -> None:
        """Subtract the penalties."""
        if fresh := answer[self._answered :]:
            seen = torch.tensor(fresh, device=self._counts.device)
            self._counts.index_add_(0, seen, self._counts.new_ones(len(fresh)))
            self._frequent[seen] = self._counts[seen] * self._frequency
            self._present[seen] = self._presence
            self._answered = len(answer)
        # Two subtractions, as in vLLM: their sum may round otherwise.
        logits -= self._frequent
        logits -= self._present


def withholding(params: SamplingParams, vocab_size: int, device: torch.device) -> list[Adjustment]:
    """Return what keeps `params`' unwanted ids out of the whole answer, in vLLM's order."""
    found: list[Adjustment] = []
    if params.allowed_token_ids:
        found.append(AllowedIds(params.allowed_token_ids, vocab_size, device))
    if params.bad_words:
        found.append(BadWords(params.bad_words))
    return found


def weighing(params: SamplingParams, vocab_size: int, prompt_ids: Sequence[int], device: torch.device) -> list[Adjustment]:
    """Return what makes ids more or less probable by `params`, in vLLM's order; `prompt_ids` without the answer's own."""
    found: list[Adjustment] = []
    if params.logit_bias:
        found.append(Bias(params.logit_bias, device))
    if params.repetition_penalty != 1.0:
        found.append(Repetition(params.repetition_penalty, vocab_size, prompt_ids, device))
    if params.frequency_penalty or params.presence_penalty:
        found.append(Occurrences(params.frequency_penalty, params.presence_penalty, vocab_size, device))
    return found
