"""The completion with which vLLM goes on with an answer that a daemon did not finish."""

from collections.abc import Sequence
from typing import Any

from gateway.plan import Plan, explicit


def goes_on_exactly(plan: Plan) -> bool:
    """Tell whether vLLM can go on with an answer to this plan as if it had begun it.

    To vLLM all ids are the prompt. That hides from it what counts over the answer alone: presence and frequency penalties,
    bad words of several tokens, a grammar's state, and what parsers have read. The repetition penalty counts over both.
    """
    sampling = plan.sampling
    penalised = sampling.presence_penalty or sampling.frequency_penalty or any(len(ids) > 1 for ids in sampling.bad_word_ids)
    return not (penalised or plan.grammar is not None or plan.parsed)


def resume_completion(plan: Plan, prompt: Sequence[int], done: Sequence[int], max_tokens: int) -> dict[str, Any] | None:
    """Return a completion that vLLM answers with what follows prompt + done; None where that would be another answer."""
    if not goes_on_exactly(plan):
        return None
    sampling = plan.sampling
    request: dict[str, Any] = {
        "model": plan.model,
        "prompt": [*prompt, *done],
        "max_tokens": max_tokens,
        **explicit(sampling),
        "min_tokens": max(0, sampling.min_tokens - len(done)),
        "stop_token_ids": list(sampling.stop_token_ids),
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()},
        "bad_words": list(sampling.bad_words),
        "priority": plan.priority,
        "stream": True,
        "return_token_ids": True,
    }
    if sampling.allowed_token_ids:
        request["allowed_token_ids"] = list(sampling.allowed_token_ids)
    if sampling.seed is not None:
        # The same seed again would repeat the first token's draw.
        request["seed"] = (sampling.seed + len(done)) % 2**63
    if sampling.logprobs is not None:
        request |= {"logprobs": sampling.logprobs, "return_tokens_as_token_ids": True}
    if plan.cache_salt is not None:
        # Without it the prompt's blocks would enter the prefix cache that all clients share.
        request["cache_salt"] = plan.cache_salt
    return request
