"""A model's own chats: it writes the user's messages at temperature 1, and answers them.

All sequences of a batch are equally long and begin alike, so nothing is padded: where an answer ends, the next message
begins.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.head.batch import Batch
from benchmarks.head.openings import OPENINGS

_MIN_P = 0.05  # of the likeliest token, below which a user's message takes none: a small model's tail is noise
_ANSWER_TEMPERATURE = 0.7  # of the answers that are not greedy
_MESSAGE_TOKENS = 96
_ANSWER_TOKENS = 256
_REPORTED = 64  # positions between two looks at the clock


@dataclass(frozen=True, slots=True)
class Template:
    """The ids that a chat template puts around what is said."""

    opening: tuple[int, ...]  # up to the first message
    to_answer: tuple[int, ...]  # from a message's end on; its first id ends the message
    to_message: tuple[int, ...]  # from an answer's end on; its first id ends the answer
    openings: tuple[tuple[int, ...], ...]  # of messages

    @classmethod
    def read(cls, model_dir: Path) -> "Template":
        """Read it from the tokenizer in `model_dir`; raises ValueError for a template that changes what is said."""
        tokenizer = tokenizer_of(model_dir)
        said = ("ANCHOR", "LEG", "RELAY")
        chat = [{"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), said, strict=True)]
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        pieces = []
        for mark in said:
            piece, found, text = text.partition(mark)
            if not found:
                raise ValueError(f"{model_dir}: the chat template hides what is said ({mark})")
            pieces.append(piece)

        def ids(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special_tokens=False))

        opening, to_answer, to_message = map(ids, pieces)
        return cls(opening, to_answer, to_message, tuple(map(ids, OPENINGS)))

    def prompt(self, model_dir: Path, message: str) -> list[int]:
        """Return the ids of a chat's beginning with one message."""
        return [*self.opening, *tokenizer_of(model_dir).encode(message, add_special_tokens=False), *self.to_answer]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Chats one behind the other, each of `length` positions; all but `states` are [positions]."""

    length: int
    ids: torch.Tensor  # int64
    states: torch.Tensor  # [positions, hidden]: from which the next position's id was chosen, before the final norm
    best: torch.Tensor  # int64: what the state of the position before says is likeliest here
    chosen: torch.Tensor  # bool: whether the model chose the id for an answer

    @property
    def chats(self) -> torch.Tensor:
        """The ids by chat, [chats, length]."""
        return self.ids.view(-1, self.length)

    def of(self, kept: torch.Tensor) -> "Corpus":
        """Return the chats for which `kept`, bool [chats], is true."""
        parts = (part.view(len(kept), self.length, *part.shape[1:])[kept].flatten(0, 1) for part in self.parts())
        return Corpus(self.length, *parts)

    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return all tensors."""
        return self.ids, self.states, self.best, self.chosen


def joined(parts: Sequence[Corpus]) -> Corpus:
    """Return one corpus of several of the same length."""
    return Corpus(parts[0].length, *(torch.cat(tensors) for tensors in zip(*(part.parts() for part in parts), strict=True)))


def tokenizer_of(model_dir: Path) -> Any:
    """Return the tokenizer in `model_dir`."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir)


class Chats:
    """Writes chats, all of them one token further with each step of the model."""

    def __init__(self, model: Batch, template: Template, rows: int, length: int, seed: int) -> None:
        """Write `rows` chats at a time, of `length` positions; `model` has room for them."""
        self._model, self._template, self._rows, self._length = model, template, rows, length
        self._device = model.weights.embedding.device
        self._random = torch.Generator(self._device).manual_seed(seed)

    def generate(self, greedy: float, late: Callable[[], bool]) -> Corpus:
        """Return chats of which the share `greedy` has greedy answers; shorter ones when it gets `late`."""
        openings = torch.randint(len(self._template.openings), (self._rows,), generator=self._random, device=self._device)
        opened = self._uniform() < 0.5
        return self._written(self._template.openings, openings, opened, opened & ~opened, self._uniform() < greedy, late)

    def answers(self, prompts: Sequence[Sequence[int]], tokens: int) -> Corpus:
        """Return greedy answers of up to `tokens` to `prompts`, one for each row; what follows them counts as not chosen."""
        scripts = [prompt[len(self._template.opening) :] for prompt in prompts]
        every = torch.ones(self._rows, dtype=torch.bool, device=self._device)
        which = torch.arange(self._rows, device=self._device)
        corpus = self._written(scripts, which, every, every, every, lambda: False)
        chosen = corpus.chosen.view(-1, corpus.length)
        for chat, row, prompt in zip(corpus.chats.tolist(), chosen, prompts, strict=True):
            ends = [place for place, token in enumerate(chat) if place >= len(prompt) and token == self._template.to_message[0]]
            row[min([len(prompt) + tokens, *(end + 1 for end in ends)]) :] = False
        return corpus

    @torch.no_grad()
    def _written(
        self,
        first: Sequence[Sequence[int]],
        which: torch.Tensor,
        begun: torch.Tensor,
        answering: torch.Tensor,
        greedily: torch.Tensor,
        late: Callable[[], bool],
    ) -> Corpus:
        """Write the chats: where `begun`, the ids `first[which]` come after the template's opening.

        `answering`: whether what comes then is of an answer. `greedily`: whether answers are. All but `first` are [rows].
        """
        template, device = self._template, self._device
        # The ids that a chat has to take before the model chooses again.
        scripts = [(), template.to_answer[1:], template.to_message[1:], *first]
        width = max(map(len, scripts)) + 1
        table = torch.tensor([[*ids, *[-1] * (width - len(ids))] for ids in scripts], device=device)
        script, (at, spoken) = torch.where(begun, which + 3, 0), torch.zeros(2, self._rows, dtype=torch.long, device=device)
        taken = [torch.full((self._rows,), token, device=device) for token in template.opening]
        best, chosen = list(taken), [torch.zeros_like(begun)] * len(taken)
        states: list[torch.Tensor] = []
        for position in range(self._length - 1):
            if position % _REPORTED == 0 and position > len(template.opening) + _REPORTED and late():
                break
            states.append(self._model.states(taken[position], position))
            if position + 1 < len(taken):
                continue
            logits = self._model.logits(states[-1]).float()
            best.append(logits.argmax(-1))
            token = torch.where(greedily & answering, best[-1], self._sampled(logits, answering))
            ending = torch.where(answering, template.to_message[0], template.to_answer[0])
            forced = table[script, at]
            free = forced < 0
            cut = free & (spoken >= torch.where(answering, _ANSWER_TOKENS, _MESSAGE_TOKENS))
            token = torch.where(cut, ending, torch.where(free, token, forced))
            taken.append(token)
            chosen.append(free & ~cut & answering)
            ended = free & (token == ending)  # the other one's turn
            at = torch.where(ended, 0, at + ~free)
            spoken = torch.where(ended, 0, spoken + free)
            script = torch.where(ended, 1 + answering.long(), script)
            answering = answering ^ ended
        states.append(torch.zeros_like(states[-1]))  # of the last position nothing was computed
        columns = (torch.stack(column, dim=1).flatten(0, 1) for column in (taken, states[: len(taken)], best, chosen))
        return Corpus(len(taken), *columns)

    def _uniform(self) -> torch.Tensor:
        return torch.rand(self._rows, generator=self._random, device=self._device)

    def _sampled(self, logits: torch.Tensor, answering: torch.Tensor) -> torch.Tensor:
        """Return a token for each row of `logits`, which are overwritten."""
        logits /= torch.where(answering, _ANSWER_TEMPERATURE, 1.0).unsqueeze(1)
        weights = logits.softmax(-1)
        weights[weights < _MIN_P * weights.amax(-1, keepdim=True)] = 0
        sums = weights.cumsum(-1)
        drawn = self._uniform().unsqueeze(1) * sums[:, -1:]
        return torch.searchsorted(sums, drawn, right=True).squeeze(1).clamp(max=logits.shape[1] - 1)


def batches(chats: Chats, seconds: float, tokens: int, greedy: float) -> Iterator[Corpus]:
    """Yield batches of one length until `seconds` have passed or there are `tokens` positions; at least one."""
    began, made = perf_counter(), 0
    length = None
    while length is None or (made < tokens and perf_counter() - began < seconds):
        batch = chats.generate(greedy, lambda: perf_counter() - began > seconds)
        if length is not None and batch.length != length:
            return
        length = batch.length
        made += len(batch.ids)
        print(
            f"generated {made:,} positions, {int(batch.chosen.sum()) / len(batch.ids):.0%} of them chosen for answers, "
            f"{made / (perf_counter() - began):,.0f} a second",
            flush=True,
        )
        yield batch
