"""Acceptance: what of a draft an answer takes. The answer is the one that single steps would have given.

Row n of a step tells what follows the draft's first n tokens. Rows are looked at in order, and each one's token is chosen as a
single step would choose it: with the sampler's state after the tokens before it, and with its position's own random number. A
row counts only if the draft was that very token until there. So neither the tokens nor their distribution depend on drafts:
with a draft d that is certain, this is the acceptance of Leviathan et al., "Fast inference from transformers via speculative
decoding" (2023), which accepts d with its probability p(d) and else draws from p without d.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from decode_daemon.engine.protocol import FinishReason, TokenLogprobs
from decode_daemon.engine.sampling import Choice, Sampler


@dataclass(frozen=True, slots=True)
class Limits:
    """Where an answer ends."""

    stop_token_ids: frozenset[int]
    end: int  # no position from this one on may hold a token

    def finish(self, token: int, position: int) -> FinishReason | None:
        """Tell if the answer ends with `token` at `position`; a stop id wins over the length, as in vLLM's `check_stop`."""
        if token in self.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if position + 1 >= self.end else None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one step adds to the answer."""

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]  # one for each id, when the request asks for them
    accepted: int  # ids that were drafted
    finish: FinishReason | None
    error: Exception | None  # what keeps the answer from going on after `ids`, of which there is at least one then


def judge(choices: Iterable[Choice], draft: Sequence[int], position: int, sampler: Sampler, limits: Limits) -> Verdict:
    """Take tokens as long as the draft foretold them, the first one that it did not foretell included.

    `choices` yields, row by row as they are asked for, the tokens for `position` and on, one more than `draft` has: each is
    chosen after `sampler` has accepted those before it. Raises what keeps even the first from being chosen.
    """
    ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    finish: FinishReason | None = None
    error: Exception | None = None
    accepted = 0
    try:
        for choice, drafted in zip(choices, (*draft, None), strict=True):
            sampler.accept((choice.token,))
            finish = limits.finish(choice.token, position + len(ids))
            ids.append(choice.token)
            if choice.logprobs is not None:
                logprobs.append(choice.logprobs)
            if choice.token != drafted:
                break
            accepted += 1
            if finish is not None:
                break
    except Exception as failure:  # of whatever kind: single steps would have told the tokens before it
        if not ids:
            raise
        error = failure
    return Verdict(tuple(ids), tuple(logprobs), accepted, finish, error)
