"""The decode loop: one sequence, one token per step.

It owns the order of things (stop ids before length, cancellation before work) and nothing of how a step is computed.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.limits import check_lengths
from decode_daemon.engine.protocol import DecodeParams, EngineDescription, EngineError, FinishReason, Step
from decode_daemon.engine.sampling import Choice, Sampler
from decode_daemon.engine.steps import StepKind, StepModel, choose_step
from decode_daemon.engine.weights import load_weights

_DTYPES = (torch.bfloat16, torch.float32)


class LlamaEngine:
    """An `Engine` for the Llama family."""

    def __init__(self, model: StepModel) -> None:
        self._model = model

    @classmethod
    def load(
        cls,
        model_dir: Path,
        *,
        dtype: torch.dtype,
        context_tokens: int,
        threads: int | None,
        step: StepKind = "auto",
        pin: bool = True,
        cache_dir: Path | None = None,
    ) -> "LlamaEngine":
        """Load a Hugging Face folder and allocate a KV cache of `context_tokens` positions.

        `dtype` (bfloat16 or float32) is that of weights and cache. `threads` is also PyTorch's thread count, which is one
        for the whole process; None leaves that alone. `step`, `pin` and `cache_dir`: see `choose_step`. Raises EngineError
        for a model, dtype or context that the engine cannot run, and for a step that this machine cannot.
        """
        if dtype not in _DTYPES:
            raise EngineError(f"dtype {dtype} is not supported: choose torch.bfloat16 or torch.float32")
        config = LlamaConfig.read(model_dir)
        if not 1 <= context_tokens <= config.max_positions:
            raise EngineError(
                f"context_tokens is {context_tokens}; {model_dir} was trained for 1 to {config.max_positions} "
                "(max_position_embeddings)"
            )
        if threads is not None:
            torch.set_num_threads(threads)
        weights = load_weights(model_dir, config, dtype)
        return cls(choose_step(config, weights, context_tokens, step=step, threads=threads, pin=pin, cache_dir=cache_dir))

    def describe(self) -> EngineDescription:
        """Return the loaded model's shape."""
        config = self._model.config
        return EngineDescription(
            architecture=config.architecture,
            layers=config.layers,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            context_tokens=self._model.context_tokens,
            dtype=self._model.cache.dtype,
        )

    def kv_target(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of K (rotated) and V for positions 0 to tokens - 1, each [layers, kv_heads, tokens, head_dim].

        Raises EngineError if `tokens` is not between 1 and the context.
        """
        if not 1 <= tokens <= self._model.context_tokens:
            raise EngineError(f"{tokens} tokens of KV do not fit this engine's context of {self._model.context_tokens} tokens")
        cache = self._model.cache[:, :, :, :tokens]
        return cache[:, 0], cache[:, 1]

    def decode(
        self,
        prompt_ids: Sequence[int],
        first_token: int,
        params: DecodeParams,
        cancelled: Callable[[], bool],
    ) -> Iterator[Step]:
        """Continue after `first_token`; see `Engine.decode`.

        A first token that already ends the answer (a stop id, max_tokens 1, a full context) yields one Step without ids.
        Raises EngineError at the call for arguments out of range, and while iterating when logits are not finite, when no id
        may follow, or when the constraint refuses a token.
        """
        self._check(prompt_ids, first_token, params)
        asked = len(prompt_ids) - params.answered
        sampler = Sampler(
            params.sampling,
            self._model.config.vocab_size,
            prompt_ids=prompt_ids[:asked],
            constraint=params.constraint,
            device=self._model.cache.device,
        )
        return self._steps(len(prompt_ids), [*prompt_ids[asked:], first_token], params, sampler, cancelled)

    def _steps(
        self, position: int, answer: Sequence[int], params: DecodeParams, sampler: Sampler, cancelled: Callable[[], bool]
    ) -> Iterator[Step]:
        """Yield the steps after `answer`, whose last token stands at `position`."""
        # The last token's KV is never needed, so an answer may end exactly at the context's end.
        end = min(position + params.max_tokens, self._model.context_tokens)
        token = answer[-1]
        finish = _finish(token, position, end, params)
        if finish is not None:
            yield Step((), finish)
            return
        sampler.accept(answer)
        while finish is None and not cancelled():
            token, logprobs = self._next(token, position, sampler)
            position += 1
            sampler.accept((token,))
            finish = _finish(token, position, end, params)
            yield Step((token,), finish, () if logprobs is None else (logprobs,))

    @torch.inference_mode()
    def _next(self, token: int, position: int, sampler: Sampler) -> Choice:
        """Choose the id that follows `token`, which stands at `position`."""
        if sampler.takes_the_largest and (best := self._model.greedy(token, position)) is not None:
            return Choice(best, None)
        # Greedy, too, where the logits are not finite: the sampler says so.
        logits = self._model.forward(torch.tensor([token]), position)
        return sampler.choose(logits[0], position + 1)

    def _check(self, prompt_ids: Sequence[int], first_token: int, params: DecodeParams) -> None:
        vocab, context = self._model.config.vocab_size, self._model.context_tokens
        check_lengths(params, len(prompt_ids))
        if len(prompt_ids) >= context:
            raise EngineError(
                f"a prompt of {len(prompt_ids)} tokens leaves no room in a context of {context}: shorten the prompt"
            )
        if not 0 <= first_token < vocab:
            raise EngineError(f"first token {first_token} is outside the vocabulary of {vocab} ids")
        if prompt_ids and not 0 <= min(prompt_ids) <= max(prompt_ids) < vocab:
            wrong = next(token for token in prompt_ids if not 0 <= token < vocab)
            raise EngineError(f"prompt token {wrong} is outside the vocabulary of {vocab} ids")


def _finish(token: int, position: int, end: int, params: DecodeParams) -> FinishReason | None:
    """Tell whether the answer ends with `token` at `position`, when no position from `end` on may hold one.

    A stop id wins over the length, as in vLLM's `check_stop`.
    """
    if token in params.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if position + 1 >= end else None
