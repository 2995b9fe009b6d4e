"""Logprobs in the two forms of the OpenAI API, as vLLM writes them, and back out of vLLM's own answers."""

import math
import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Annotated, Any, TypeVar

import msgspec
from tokenizers import Tokenizer

from gateway.plan import Plan
from gateway.text import REPLACEMENT
from gateway.tokens import TokenLogprobs

_LOWEST = -9999.0  # JSON has no infinity; vLLM shows this for anything lower
_CONTEXT = 4  # tokens: as many as one character can be cut into
_T = TypeVar("_T")
_ID = re.compile(r"token_id:(0|[1-9][0-9]{0,9})")


class _Positions:
    """Reads an answer's positions in order: each one's tokens with their logprobs and names."""

    def __init__(self, tokenizer: Tokenizer, plan: Plan) -> None:
        self._texts = _TokenTexts(tokenizer)
        self._as_ids = plan.form.tokens_as_ids
        self._before: tuple[int, ...] = ()  # the answer's last tokens

    def read(self, token: int, told: TokenLogprobs, count: int) -> tuple[str, list[tuple[str, float]]]:
        """Return the token's own text, and the first `count` entries of its position as they are named.

        The token itself comes first, whether it is among the most probable or not, and only there.
        """
        entries = {token: told.logprob} | dict(told.top) | {token: told.logprob}
        shown = [(self._name(other), _shown(logprob)) for other, logprob in list(entries.items())[:count]]
        text = self._texts.of(token, self._before)
        self._before = (*self._before, token)[-_CONTEXT:]
        return text, shown

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._texts.of(token, self._before)


class ChatLogprobs:
    """Writes the logprobs of one chat answer."""

    def __init__(self, tokenizer: Tokenizer, plan: Plan) -> None:
        self._positions = _Positions(tokenizer, plan)
        self._as_ids = plan.form.tokens_as_ids
        self._count = plan.sampling.logprobs or 0

    def content(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        """Return the entries of the answer's next tokens."""
        return [self._entry(token, told) for token, told in zip(ids, logprobs, strict=True)]

    def _entry(self, token: int, told: TokenLogprobs) -> dict[str, Any]:
        text, top = self._positions.read(token, told, self._count)
        return {
            "token": f"token_id:{token}" if self._as_ids else text,
            "logprob": _shown(told.logprob),
            # Always the text's, while an alternative has those of the name it is shown by.
            "bytes": list(text.encode()),
            "top_logprobs": [{"token": name, "logprob": lp, "bytes": list(name.encode())} for name, lp in top],
        }


class CompletionLogprobs:
    """Writes the logprobs of one completion."""

    def __init__(self, tokenizer: Tokenizer, plan: Plan) -> None:
        self._positions = _Positions(tokenizer, plan)
        self._count = 1 + (plan.sampling.logprobs or 0)
        self._offset = 0  # characters of the tokens so far, as they are named

    def columns(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        """Return the entries of the answer's next tokens."""
        columns: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token, told in zip(ids, logprobs, strict=True):
            _, entries = self._positions.read(token, told, self._count)
            name, logprob = entries[0]
            columns["text_offset"].append(self._offset)
            columns["token_logprobs"].append(logprob)
            columns["tokens"].append(name)
            # Tokens of the same text are one member of the object: the last one's value in the first one's place.
            columns["top_logprobs"].append(dict(entries))
            self._offset += len(name)
        return columns


class _TokenTexts:
    """Token ids to text one by one, as vLLM names them in logprobs (v1/engine/logprobs.py, tokenizers/detokenizer_utils.py)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._space = _space_mark(tokenizer)

    def of(self, token: int, before: Sequence[int]) -> str:
        """Return a token's text after the answer's last tokens; "" while it leaves a character unfinished."""
        text = self._decode([token])
        if self._space is not None:
            # Such a tokenizer drops a text's leading space, which here is a token's own.
            raw = self._tokenizer.id_to_token(token) or ""
            marks = len(raw) - len(raw.lstrip(self._space))
            text = " " * (marks - (len(text) - len(text.lstrip(" ")))) + text
        return self._completed(token, before) if text.endswith(REPLACEMENT) else text

    def _completed(self, token: int, before: Sequence[int]) -> str:
        """Return what a token adds that ends in the middle of a character by itself."""
        for count in range(1, len(before) + 1):
            context = list(before[-count:])
            whole = self._decode([*context, token])
            if whole.endswith(REPLACEMENT):
                continue
            # Earlier tokens that ended in the same unfinished character had no text: it is this one's.
            while context and self._decode(context[-1:]).endswith(REPLACEMENT):
                context.pop()
            same = takewhile(lambda pair: pair[0] == pair[1], zip(self._decode(context), whole, strict=False))
            return whole[len(list(same)) :]
        return ""

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _space_mark(tokenizer: Tokenizer) -> str | None:
    """Return what stands for a leading space in the vocabulary of a SentencePiece model; None for others."""
    if tokenizer.pre_tokenizer is None:
        return None
    step = msgspec.json.decode(tokenizer.pre_tokenizer.__getstate__())
    marks = [each["replacement"] for each in step.get("pretokenizers", [step]) if each["type"] == "Metaspace"]
    return marks[0] if marks else None


def _shown(logprob: float) -> float:
    return logprob if _LOWEST < logprob < math.inf else _LOWEST  # not a number is neither


# --- and back ---

_Logprob = Annotated[float, msgspec.Meta(ge=_LOWEST)]


class _Entry(msgspec.Struct):
    token: str
    logprob: _Logprob


class _ContentEntry(_Entry):
    top_logprobs: list[_Entry]


class _Content(msgspec.Struct):
    content: list[_ContentEntry]


class _Columns(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[_Logprob]
    top_logprobs: list[dict[str, _Logprob]]


def read_chat_logprobs(value: Any, ids: Sequence[int] | None = None) -> tuple[TokenLogprobs, ...]:
    """Read the parsed logprobs of a chat choice made with return_tokens_as_token_ids, one for each token.

    Raises ValueError when they are no such thing, or not those of `ids`.
    """
    entries = _convert(value, _Content).content
    _check(tuple(_id(entry.token) for entry in entries), ids)
    return tuple(
        TokenLogprobs(entry.logprob, tuple((_id(top.token), top.logprob) for top in entry.top_logprobs)) for entry in entries
    )


def read_completion_logprobs(value: Any, ids: Sequence[int] | None = None) -> tuple[TokenLogprobs, ...]:
    """Read the parsed logprobs of a completion's choice made with return_tokens_as_token_ids, one for each token.

    Raises ValueError when they are no such thing, or not those of `ids`.
    """
    columns = _convert(value, _Columns)
    _check(tuple(map(_id, columns.tokens)), ids)
    # A length that differs from the others' is a ValueError of zip's.
    return tuple(
        TokenLogprobs(logprob, tuple((_id(name), lp) for name, lp in top.items()))
        for _, logprob, top in zip(columns.tokens, columns.token_logprobs, columns.top_logprobs, strict=True)
    )


def _convert(value: Any, kind: type[_T]) -> _T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"these are no logprobs: {error}") from error


def _id(name: str) -> int:
    match = _ID.fullmatch(name)
    if match is None or int(match[1]) >= 2**32:
        raise ValueError(f"logprobs name a token {name!r}: expected token_id and a number")
    return int(match[1])


def _check(told: tuple[int, ...], ids: Sequence[int] | None) -> None:
    if ids is not None and told != tuple(ids):
        raise ValueError(f"logprobs are of tokens {list(told)}, not of {list(ids)}")
