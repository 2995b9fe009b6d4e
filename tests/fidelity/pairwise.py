"""Combinations of fields: few cases in which every pair of values of two different axes meets at least once."""

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations
from typing import Any

from tests.fidelity.case import ABSENT, Case, chat, text
from tests.fidelity.fields import END, FEW, OF, PARIS

Row = dict[str, str]
Pair = frozenset[tuple[str, str]]


def cover(axes: Mapping[str, Sequence[str]]) -> list[Row]:
    """Return rows, one value of each axis in each, so that each pair of values of two axes is in some row.

    Greedy: a row begins with the first pair that no row has yet, and takes for each axis the value that brings most such pairs.
    """
    left = {_pair((a, x), (b, y)): None for a, b in combinations(axes, 2) for x in axes[a] for y in axes[b]}
    rows = []
    while left:
        row = dict(sorted(next(iter(left))))
        for axis, values in axes.items():
            if axis not in row:
                row[axis] = max(values, key=lambda value: sum(_pair((axis, value), held) in left for held in row.items()))
        for one, other in combinations(row.items(), 2):
            left.pop(_pair(one, other), None)
        rows.append(row)
    return rows


def _pair(one: tuple[Hashable, Hashable], other: tuple[Hashable, Hashable]) -> Any:
    return frozenset((one, other))


_USAGE = {"include_usage": True}
_AXES: dict[str, dict[str, dict[str, Any]]] = {
    "path": {"chat": {}, "text": {}},
    "form": {
        "whole": {},
        "stream": {"stream": True},
        "usage": {"stream": True, "stream_options": _USAGE},
        "continuous": {"stream": True, "stream_options": {**_USAGE, "continuous_usage_stats": True}},
    },
    "choosing": {
        "greedy": {"temperature": 0},
        "top_k": {"temperature": 1, "top_k": 1},
        "min_p": {"temperature": 0.9, "min_p": 1},
    },
    "penalties": {
        "none": {},
        "additive": {"presence_penalty": 0.7, "frequency_penalty": 0.4},
        "repetition": {"repetition_penalty": 1.25},
    },
    "mask": {
        "none": {},
        "bias": {"logit_bias": {str(PARIS): -100, "253": 1.5}},
        "bad words": {"bad_words": ["capital", "small"]},
        "few": {"allowed_token_ids": [*FEW, END]},
    },
    "stop": {
        "none": {},
        "text": {"stop": [" of", ". ", "zzz"]},
        "shown": {"stop": ["of F", "n the"], "include_stop_str_in_output": True},
        "ids": {"stop_token_ids": [OF, 253]},
    },
    "length": {"12": {"max_tokens": 12}, "2": {"max_tokens": 2}, "1": {"max_tokens": 1}},
    "least": {"0": {}, "5": {"min_tokens": 5}},
    "eos": {"ends": {}, "ignored": {"ignore_eos": True}},
    "logprobs": {"3": {"logprobs": 3}, "0": {"logprobs": 0}, "none": {}},
    "ids": {"ids": {"return_token_ids": True}, "names": {"return_tokens_as_token_ids": True}, "no": {}},
    "specials": {"hidden": {}, "shown": {"skip_special_tokens": False}},
    "grammar": {"none": {}, "regex": {"structured_outputs": {"regex": r"[A-Z][a-z ]{3,6}\."}}},
}


def _case(number: int, row: Row) -> Case:
    fields: dict[str, Any] = {}
    for axis, value in row.items():
        fields |= _AXES[axis][value]
    fields["min_tokens"] = min(fields.get("min_tokens", 0), fields["max_tokens"])
    if "structured_outputs" in fields and "allowed_token_ids" in fields:
        fields["allowed_token_ids"] = ABSENT  # a mask and a grammar that leave no token are another matter
    name = f"pair {number}: " + ", ".join(row[axis] for axis in _AXES)
    if row["path"] == "text":
        return text(name, **fields)
    if "logprobs" in fields:
        fields["top_logprobs"] = fields["logprobs"]
        fields["logprobs"] = True
    return chat(name, **fields)


def cases() -> list[Case]:
    """Return the combinations."""
    rows = cover({axis: list(values) for axis, values in _AXES.items()})
    return [_case(number, row) for number, row in enumerate(rows)]
