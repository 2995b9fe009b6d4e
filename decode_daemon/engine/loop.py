"""The decode loop: one sequence, and for each step the next token and as many drafted ones as were right.

It owns the order of things (what a step verifies, cancellation before work) and nothing of how a step is computed.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from decode_daemon.engine.acceptance import Limits, Verdict, judge
from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.cuda.quantized import WeightsKind, check_quantizable
from decode_daemon.engine.cuda.shards import check_divisible
from decode_daemon.engine.head_native import head_for
from decode_daemon.engine.headfile import HeadFile
from decode_daemon.engine.limits import check_lengths
from decode_daemon.engine.protocol import DecodeParams, EngineDescription, EngineError, Step
from decode_daemon.engine.sampling import Choice, Sampler
from decode_daemon.engine.speculation import Draft, Speculation, SpeculationKind
from decode_daemon.engine.steps import StepKind, StepModel, choose_step
from decode_daemon.engine.weights import load_weights

_DTYPES = (torch.bfloat16, torch.float32)


class LlamaEngine:
    """An `Engine` for the Llama family."""

    def __init__(self, model: StepModel, speculation: Speculation | None = None) -> None:
        """Decode with `model`, one token a step without `speculation`."""
        self._model = model
        self._speculation = speculation

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
        speculation: SpeculationKind = "off",
        draft_head: Path | None = None,
        tensor_parallel: int = 1,
        weights_as: WeightsKind = "as-is",
    ) -> "LlamaEngine":
        """Load a Hugging Face folder and allocate a KV cache of `context_tokens` positions.

        `dtype` (bfloat16 or float32) is that of weights and cache. `threads` is also PyTorch's thread count, which is one
        for the whole process; None leaves that alone. For `step`, `pin`, `cache_dir`, `tensor_parallel` and `weights_as`
        see `choose_step`. `speculation`: what drafts tokens, where the step can verify them exactly; `draft_head`: what it
        drafts with for "auto", see `head_for`. Raises EngineError for a model, dtype or context that the engine cannot run,
        for a step that this machine cannot, and for another model's draft head.
        """
        if dtype not in _DTYPES:
            raise EngineError(f"dtype {dtype} is not supported: choose torch.bfloat16 or torch.float32")
        config = LlamaConfig.read(model_dir)
        if not 1 <= context_tokens <= config.max_positions:
            raise EngineError(
                f"context_tokens is {context_tokens}; {model_dir} was trained for 1 to {config.max_positions} "
                "(max_position_embeddings)"
            )
        if draft_head is not None and speculation == "auto":
            HeadFile.read(draft_head)  # what is wrong with it is known before the minutes that reading a large model may take
        if draft_head is not None and speculation != "auto":
            raise EngineError(
                f"speculation is {speculation}, which does not draft with {draft_head}: choose auto, or no draft head"
            )
        if threads is not None:
            torch.set_num_threads(threads)
        check_divisible(config, tensor_parallel)  # before the minutes that reading a large model may take
        if weights_as == "fp8":
            check_quantizable(config, tensor_parallel, step)
        weights = load_weights(model_dir, config, dtype)
        model = choose_step(
            *(config, weights, context_tokens),
            step=step,
            threads=threads,
            pin=pin,
            cache_dir=cache_dir,
            tensor_parallel=tensor_parallel,
            weights_as=weights_as,
        )
        head = None
        if speculation == "auto":
            head = head_for(model, weights, draft_head, threads=threads, pin=pin, cache_dir=cache_dir)
        return cls(model, Speculation.of(speculation, model, head))

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
        return self._steps([*prompt_ids, first_token], asked, params, sampler, cancelled)

    def _steps(
        self, ids: Sequence[int], asked: int, params: DecodeParams, sampler: Sampler, cancelled: Callable[[], bool]
    ) -> Iterator[Step]:
        """Yield the steps after `ids`, of which those from `asked` on are the answer so far."""
        token, position = ids[-1], len(ids) - 1
        # The last token's KV is never needed, so an answer may end exactly at the context's end.
        limits = Limits(params.stop_token_ids, min(position + params.max_tokens, self._model.context_tokens))
        finish = limits.finish(token, position)
        if finish is not None:
            yield Step((), finish)
            return
        sampler.accept(ids[asked:])
        speculation = self._speculation if params.speculate else None
        draft = Draft()
        if speculation is not None:
            speculation.begin(ids)
        try:
            while not cancelled():
                if speculation is not None:
                    # A step emits one more than it verifies, and nothing may stand at the end.
                    draft = speculation.draft(token, position, limits.end - position - 2)
                verdict = self._judged((token, *draft.ids), position, sampler, limits, speculation)
                yield Step(verdict.ids, verdict.finish, verdict.logprobs, len(draft.ids), verdict.accepted)
                if verdict.error is not None:
                    raise verdict.error
                if verdict.finish is not None:
                    return
                if speculation is not None:
                    speculation.saw(draft, verdict)
                token, position = verdict.ids[-1], position + len(verdict.ids)
        finally:
            if speculation is not None:
                speculation.end()

    @torch.inference_mode()
    def _judged(
        self, ids: tuple[int, ...], position: int, sampler: Sampler, limits: Limits, speculation: Speculation | None
    ) -> Verdict:
        """Compute the step of `ids`, the first of which stands at `position` and the others are drafted, and judge these."""
        choices = self._choices(ids, position, sampler, speculation)
        return judge(choices, ids[1:], position + 1, sampler, limits)

    def _choices(
        self, ids: tuple[int, ...], position: int, sampler: Sampler, speculation: Speculation | None
    ) -> Iterator[Choice]:
        """Yield what follows each of `ids`, each chosen when it is asked for."""
        began = time.perf_counter()
        if not sampler.takes_the_largest:
            rows = self._model.forward(torch.tensor(ids), position)
            if speculation is not None and rows.device.type == "cpu":  # on a GPU the step may only have been queued
                speculation.took(len(ids), position, time.perf_counter() - began)
            for nth, logits in enumerate(rows):
                yield sampler.choose(logits, position + nth + 1)
            return
        if speculation is None or (len(ids) == 1 and speculation.quiet):
            bests = [self._model.greedy(ids[0], position)]
        else:
            bests = self._model.bests(ids, position)
        if speculation is not None:
            speculation.took(len(ids), position, time.perf_counter() - began)
        for nth, best in enumerate(bests):
            if best is None:  # where the logits are not finite, the sampler says so
                (logits,) = self._model.forward(torch.tensor([ids[nth]]), position + nth)
                yield sampler.choose(logits, position + nth + 1)
            else:
                yield Choice(best, None)

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
