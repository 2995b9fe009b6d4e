"""All cases, in the order in which they are shown."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from tests.fidelity import defaults, endpoints, fields, odd, pairwise, parsed_cases, reasoning_cases
from tests.fidelity.case import Case

CASES: tuple[Case, ...] = (*fields.cases(), *endpoints.cases(), *odd.cases(), *pairwise.cases())
"""For a stack without parsers, and a model without defaults of its own."""

PARSED: tuple[Case, ...] = (
    *defaults.cases(),
    *fields.streamed_chats(),
    # The model calls tools because it copies its earlier turns, and its default penalty would keep it from that.
    *(replace(case, body={**case.fields, "repetition_penalty": 1.0, "cache_salt": case.name}) for case in parsed_cases.cases()),
)
"""For a stack whose vLLM parses tool calls, and a model with generation defaults."""

REASONING: tuple[Case, ...] = tuple(
    replace(case, body={**case.fields, "cache_salt": case.name}) for case in reasoning_cases.cases()
)
"""For a stack whose vLLM parses reasoning and tool calls."""


def new(cases: Iterable[Case]) -> list[Case]:
    """Return the cases that do not say again what another one says: those for `make test`; `make fidelity` has them all."""
    return [case for case in cases if not case.again]


def chosen(items: Iterable[pytest.Item], cases: Iterable[Case]) -> list[Case]:
    """Return the cases whose tests are to run; all that are new where none of their tests is."""
    names = {item.name.partition("[")[2].removesuffix("]") for item in items}
    listed = new(cases)
    return [case for case in listed if case.name in names] or listed
