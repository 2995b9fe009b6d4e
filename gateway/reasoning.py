"""Tokens of reasoning, counted as vLLM's parsers do for `usage`; its derender endpoint does not tell their number."""

from collections.abc import Iterable

from tokenizers import Tokenizer

_MARKERS = {"deepseek_r1": ("<think>", "</think>"), "ernie45": ("<think>", "</think>")}
_NOT_COUNTED = frozenset({"granite", "hunyuan_a13b", "minimax_m2_append_think", "olmo3"})  # vLLM's parsers of these say 0


class ReasoningTokens:
    """Counts the tokens between a start and an end marker (BaseThinkingReasoningParser.count_reasoning_tokens)."""

    def __init__(self, start: int | None, end: int | None) -> None:
        self._start = start
        self._end = end
        self._depth = 0
        self._count = 0

    def add(self, ids: Iterable[int]) -> int:
        """Take the answer's next tokens; returns how many of all so far are reasoning."""
        for token in ids:
            if token == self._start:
                self._depth += 1
            elif token == self._end:
                self._depth = max(0, self._depth - 1)
            elif self._depth:
                self._count += 1
        return self._count


def reasoning_tokens(parser: str, tokenizer: Tokenizer) -> ReasoningTokens | None:
    """Return what counts for a reasoning parser of vLLM's, by its name; None where only vLLM can."""
    if parser in _NOT_COUNTED:
        return ReasoningTokens(None, None)
    markers = _MARKERS.get(parser)
    return None if markers is None else ReasoningTokens(*map(tokenizer.token_to_id, markers))
