"""What an answer's text must match: from the two fields in which a request may say it to one form for the decode leg.

Whether a grammar can be compiled is not looked at here: the fields reach vLLM with the prefill leg as they came, and vLLM says
what is wrong with them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

_DEEPEST = 64  # nested objects and arrays in a schema (vLLM: MAX_STRUCTURED_OUTPUT_JSON_NESTING)
_TAG_WRAPPING = 16  # more of them in a structural tag


class GrammarKind(StrEnum):
    """The forms of constraint vLLM takes; values are the wire's names (handoff/decode.proto)."""

    JSON_SCHEMA = "JSON_SCHEMA"
    JSON_OBJECT = "JSON_OBJECT"
    REGEX = "REGEX"
    CHOICE = "CHOICE"
    EBNF = "EBNF"
    STRUCTURAL_TAG = "STRUCTURAL_TAG"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the answer's text must match."""

    kind: GrammarKind
    source: str = ""  # JSON for a schema, a list of choices, or a structural tag


_KINDS = {
    "json": GrammarKind.JSON_SCHEMA,
    "json_object": GrammarKind.JSON_OBJECT,
    "regex": GrammarKind.REGEX,
    "choice": GrammarKind.CHOICE,
    "grammar": GrammarKind.EBNF,
    "structural_tag": GrammarKind.STRUCTURAL_TAG,
}
_DEFAULTS: Mapping[str, bool | None] = {
    "disable_any_whitespace": False,
    "disable_additional_properties": False,
    "whitespace_pattern": None,
}


def admits_response_format(value: Any) -> bool:
    """Whether the lane serves this `response_format`."""
    if not isinstance(value, dict):
        return False
    members = {key: member for key, member in value.items() if key not in ("type", "json_schema") or member is not None}
    match members.pop("type", None):
        case "text" | "json_object":
            return not members
        case "json_schema":
            return _named_schema(members.pop("json_schema", None)) and not members
        case "structural_tag":
            return _structural_tag(members)
        case _:
            return False


def admits_structured_outputs(value: Any) -> bool:
    """Whether the lane serves this `structured_outputs`: one constraint, everything else at its default."""
    if not isinstance(value, dict) or not value.keys() <= _KINDS.keys() | _DEFAULTS.keys():
        return False
    if any(value.get(key, default) is not default for key, default in _DEFAULTS.items()):
        return False
    constraints = {key: value[key] for key in _KINDS if value.get(key) is not None}
    return len(constraints) == 1 and _constraint(*constraints.popitem())


def is_constraint(response_format: Any) -> bool:
    """Whether an admitted `response_format` asks for anything but text."""
    return response_format is not None and response_format["type"] != "text"


def grammar_of(response_format: Any, structured_outputs: Any) -> Grammar | None:
    """Return what two admitted values ask for; None where they ask for nothing. Raises ValueError for what JSON cannot say."""
    if is_constraint(response_format):
        match response_format["type"]:
            case "json_object":
                return Grammar(GrammarKind.JSON_OBJECT)
            case "json_schema":
                return Grammar(GrammarKind.JSON_SCHEMA, _json(response_format["json_schema"]["schema"]))
            case _:
                return Grammar(GrammarKind.STRUCTURAL_TAG, _json(response_format))
    if structured_outputs is None:
        return None
    key, value = next((key, structured_outputs[key]) for key in _KINDS if structured_outputs.get(key) is not None)
    if key == "json_object":
        return Grammar(GrammarKind.JSON_OBJECT)
    return Grammar(_KINDS[key], value if isinstance(value, str) else _json(value))


def _named_schema(value: Any) -> bool:
    if not isinstance(value, dict) or not value.keys() <= {"name", "description", "schema", "strict"}:
        return False
    schema = value.get("schema")
    return (
        isinstance(value.get("name"), str)
        and isinstance(value.get("description"), str | None)
        and isinstance(value.get("strict"), bool | None)
        and isinstance(schema, dict)
        and not _deeper_than(schema, _DEEPEST)
    )


def _structural_tag(members: dict[str, Any]) -> bool:
    """Admit the two forms of a structural tag with no member left out or added: vLLM hands on what its classes write out."""
    if _deeper_than(members, _DEEPEST + _TAG_WRAPPING):
        return False
    if members.keys() == {"format"}:
        return True
    if members.keys() != {"structures", "triggers"}:
        return False
    structures, triggers = members["structures"], members["triggers"]
    return (
        isinstance(triggers, list)
        and all(isinstance(trigger, str) for trigger in triggers)
        and isinstance(structures, list)
        and all(isinstance(structure, dict) and _structure(structure) for structure in structures)
    )


def _structure(value: dict[str, Any]) -> bool:
    return (
        value.keys() == {"begin", "schema", "end"}
        and isinstance(value["begin"], str)
        and isinstance(value["end"], str)
        and isinstance(value["schema"], dict)
    )


def _constraint(key: str, value: Any) -> bool:
    match key:
        case "json":
            written = isinstance(value, str) and bool(value.strip()) and not _deeper_than(value, _DEEPEST)
            return written or (isinstance(value, dict) and not _deeper_than(value, _DEEPEST))
        case "json_object":
            return value is True
        case "choice":
            return isinstance(value, list) and bool(value) and all(isinstance(choice, str) for choice in value)
        case "regex":
            return isinstance(value, str) and "\0" not in value
        case "structural_tag":
            return isinstance(value, str) and bool(value.strip()) and not _deeper_than(value, _DEEPEST + _TAG_WRAPPING)
        case _:
            return isinstance(value, str) and bool(value.strip())


def _deeper_than(value: Any, levels: int) -> bool:
    """Whether a JSON value, or text that is one, nests objects and arrays in more levels than these."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except RecursionError:
            return True
        except ValueError:
            return False  # vLLM says so
    pending = [(value, 1)]
    while pending:
        node, depth = pending.pop()
        if isinstance(node, dict | list):
            if depth > levels:
                return True
            pending.extend((child, depth + 1) for child in (node.values() if isinstance(node, dict) else node))
    return False


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False)
