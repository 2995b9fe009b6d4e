"""Which JSON schemas vLLM gives to xgrammar: those whose every keyword it enforces, nested so deep and no deeper.

The facts are vLLM 0.32's (v1/structured_output/backend_xgrammar.py, sampling_params.py); tests hold them against it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

DEEPEST = 64  # levels of objects and lists in a schema
DEEPEST_TAG = DEEPEST + 16  # in a structural tag, whose own wrapping counts

_FORMATS_OF_TIME = {"date", "time", "date-time", "duration"}
_FORMATS_OF_NAMES = {"email", "hostname", "ipv4", "ipv6", "uuid", "uri", "uri-reference", "uri-template"}
_FORMATS = _FORMATS_OF_TIME | _FORMATS_OF_NAMES | {"json-pointer", "relative-json-pointer"}
_OF_ARRAYS = ("uniqueItems", "contains", "minContains", "maxContains")


def deeper_than(limit: int, value: Any) -> bool:
    """Tell whether objects and lists nest more than `limit` levels in parsed JSON."""
    level, depth = _containers([value]), 0
    while level and depth <= limit:
        depth += 1
        level = _containers([child for node in level for child in _children(node)])
    return depth > limit


def unenforced(schema: Any) -> str | None:
    """Return a keyword (or several) of a parsed schema that xgrammar would not hold an answer to, None if there is none."""
    return next((found for node in _objects(schema) if (found := _unenforced_here(node)) is not None), None)


def _unenforced_here(node: Mapping[str, Any]) -> str | None:
    types = _types(node)
    if types & {"integer", "number"} and "multipleOf" in node:
        return "multipleOf"
    if "array" in types and (found := [name for name in _OF_ARRAYS if name in node]):
        return found[0]
    if "string" in types and "format" in node and not _is_known_format(node["format"]):
        return f"format {node['format']!r}"
    if "string" in types and _is_shaped_and_bounded(node):
        return "a length beside pattern or format"
    if "object" in types and (found_names := _unenforced_names(node)) is not None:
        return found_names
    parts = node.get("allOf")
    return "allOf of several schemas" if isinstance(parts, list) and len(parts) > 1 else None


def _unenforced_names(node: Mapping[str, Any]) -> str | None:
    """Return what xgrammar does not enforce of the names of an object's properties."""
    patterns = node.get("patternProperties")
    if "propertyNames" in node:
        names = node["propertyNames"]
        if isinstance(names, dict) and _is_shaped_and_bounded(names):
            return "propertyNames with a length beside pattern or format"
        for other in ("patternProperties", "properties"):
            if other in node:
                return f"propertyNames beside {other}"
        if node.get("unevaluatedProperties", True) is not True:
            return "propertyNames beside unevaluatedProperties"
    if isinstance(patterns, dict):
        if "properties" in node:
            return "patternProperties beside properties"
        if len(patterns) > 1:
            return "several patternProperties"
    return None


def _types(node: Mapping[str, Any]) -> set[str]:
    given = node.get("type")
    names = given if isinstance(given, list) else [given]
    return {name for name in names if isinstance(name, str)}


def _is_known_format(name: Any) -> bool:
    return isinstance(name, str) and name in _FORMATS


def _is_shaped_and_bounded(node: Mapping[str, Any]) -> bool:
    return ("pattern" in node or "format" in node) and ("minLength" in node or "maxLength" in node)


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield the objects that vLLM looks at: a schema, and those that objects hold, directly or in a list."""
    waiting = [schema] if isinstance(schema, dict) else []
    while waiting:
        node = waiting.pop()
        yield node
        for value in node.values():
            waiting += [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, dict)]


def _containers(values: list[Any]) -> list[Any]:
    return [value for value in values if isinstance(value, dict | list)]


def _children(node: Any) -> Any:
    return node.values() if isinstance(node, dict) else node
