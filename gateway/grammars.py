"""What an answer's text must match: from the two fields in which a request may say it to one form for the decode leg.

Whether a grammar can be compiled is not looked at here. A daemon refuses, before there is a prefill, what it would not match as
vLLM does (decode_daemon/grammar); plain vLLM then gets the request, and says itself what is wrong with it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


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
    param: str = field(default="response_format", compare=False)  # the request's field that it comes from


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
    """Return what two admitted values ask for; None where they ask for nothing.

    Raises ValueError for what cannot be written as JSON.
    """
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
    param = "structured_outputs"
    key, value = next((key, structured_outputs[key]) for key in _KINDS if structured_outputs.get(key) is not None)
    if key == "json_object":
        return Grammar(GrammarKind.JSON_OBJECT, param=param)
    return Grammar(_KINDS[key], value if isinstance(value, str) else _json(value), param)


def _named_schema(value: Any) -> bool:
    if not isinstance(value, dict) or not value.keys() <= {"name", "description", "schema", "strict"}:
        return False
    return (
        isinstance(value.get("name"), str)
        and isinstance(value.get("description"), str | None)
        and isinstance(value.get("strict"), bool | None)
        and isinstance(value.get("schema"), dict)
    )


def _structural_tag(members: dict[str, Any]) -> bool:
    """Admit the two forms of a structural tag with no member left out or added: vLLM hands on what its classes write out."""
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
            return isinstance(value, dict) or (isinstance(value, str) and bool(value.strip()))
        case "json_object":
            return value is True
        case "choice":
            return isinstance(value, list) and bool(value) and all(isinstance(choice, str) for choice in value)
        case "regex":
            return isinstance(value, str) and "\0" not in value
        case _:  # grammar, structural_tag
            return isinstance(value, str) and bool(value.strip())


def _json(value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise ValueError("the grammar has numbers that JSON does not know") from error
    except RecursionError as error:
        raise ValueError("the grammar nests without end") from error
