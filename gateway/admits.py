"""Which JSON values the lane serves: predicates for the rows of the field table.

They admit what vLLM takes without a conversion. pydantic would also take "1" or 1.0 for 1 and 1 for true: such bodies are plain
vLLM's, which knows its own conversions best.
"""

from collections.abc import Callable
from typing import Any

Admits = Callable[[Any], bool]

_INT64 = 2**63
_MOST_STOPS = 4  # vLLM's own limit (VLLM_MAX_STOP_STRINGS): it answers more of them with 400
_MOST_LOGPROBS = 20  # vLLM's own limit (--max-logprobs), and OpenAI's
_LONGEST_SALT = 128  # vLLM: entrypoints/generate/base/protocol.py, validate_cache_salt
_NOT_IN_A_SALT = frozenset("@/\\\0")
_ID_DIGITS = 10  # of the largest token id; int() also takes signs, spaces and underscores, as nobody writes them
_STREAM_OPTIONS = frozenset({"include_usage", "continuous_usage_stats", "include_obfuscation"})


def anything(_: Any) -> bool:
    """Admit every value."""
    return True


def nothing(_: Any) -> bool:
    """Admit no value."""
    return False


def only(*values: Any) -> Admits:
    """Admit these values. Types are compared too: 0, 0.0 and False are equal in Python, and not to vLLM's validation."""
    return lambda value: any(value == allowed and type(value) is type(allowed) for allowed in values)


def boolean(value: Any) -> bool:
    """Admit true and false."""
    return isinstance(value, bool)


def text(value: Any) -> bool:
    """Admit strings."""
    return isinstance(value, str)


def object_(value: Any) -> bool:
    """Admit JSON objects."""
    return isinstance(value, dict)


def is_int(value: Any) -> bool:
    """Whether this is a JSON integer."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether this is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e308 <= value <= 1e308


def integer(low: int, below: int) -> Admits:
    """Admit integers from `low` to `below`, exclusive."""
    return lambda value: is_int(value) and low <= value < below


def number(low: float, high: float) -> Admits:
    """Admit numbers from `low` to `high`, inclusive."""
    return lambda value: is_number(value) and low <= value <= high


def probability(value: Any) -> bool:
    """Admit a share of probability that leaves something to choose from."""
    return is_number(value) and 0 < value <= 1


int64 = integer(-_INT64, _INT64)
count = integer(0, 2**31)
positive = integer(1, 2**31)
logprobs = integer(0, _MOST_LOGPROBS + 1)


def name(value: Any) -> bool:
    """Admit strings that are not empty."""
    return isinstance(value, str) and bool(value)


def token_ids(value: Any) -> bool:
    """Admit lists of token ids, empty ones too; whether the model has these ids is for its card to say."""
    return isinstance(value, list) and (not value or (set(map(type, value)) == {int} and min(value) >= 0))


def some_token_ids(value: Any) -> bool:
    """Admit lists of token ids that are not empty."""
    return token_ids(value) and bool(value)


def token_biases(value: Any) -> bool:
    """Admit numbers by token id, the ids written in digits."""
    return isinstance(value, dict) and all(
        key.isascii() and key.isdigit() and len(key) <= _ID_DIGITS and is_number(bias) for key, bias in value.items()
    )


def stops(value: Any) -> bool:
    """Admit one stop string, or a list of some."""
    listed = [value] if isinstance(value, str) else value
    return isinstance(listed, list) and len(listed) <= _MOST_STOPS and all(map(name, listed))


def words(value: Any) -> bool:
    """Admit lists of strings with more than white space in them."""
    return isinstance(value, list) and all(isinstance(word, str) and word.strip() for word in value)


def salt(value: Any) -> bool:
    """Admit what vLLM takes for a salt of its prefix cache."""
    return name(value) and len(value) <= _LONGEST_SALT and _NOT_IN_A_SALT.isdisjoint(value)


def stream_options(value: Any) -> bool:
    """Admit options of a stream; obfuscation is OpenAI's own, and vLLM has none."""
    return (
        isinstance(value, dict)
        and value.keys() <= _STREAM_OPTIONS
        and all(option is None or isinstance(option, bool) for option in value.values())
    )


def documents(value: Any) -> bool:
    """Admit lists of objects whose values are strings."""
    return isinstance(value, list) and all(
        isinstance(document, dict) and all(map(text, document.values())) for document in value
    )


def messages(value: Any) -> bool:
    """Admit messages of text."""
    return isinstance(value, list) and bool(value) and all(isinstance(message, dict) and _message(message) for message in value)


def prompt(value: Any) -> bool:
    """Admit one prompt: a string or token ids, also as a list of one."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    return name(value) or some_token_ids(value)


def tools(value: Any) -> bool:
    """Admit lists of functions."""
    return isinstance(value, list) and bool(value) and all(isinstance(tool, dict) and _tool(tool) for tool in value)


def tool_choice(value: Any) -> bool:
    """Admit the choices that vLLM knows; whether there is such a tool is looked at elsewhere."""
    if isinstance(value, dict):
        function = value.get("function")
        return value.get("type", "function") == "function" and isinstance(function, dict) and name(function.get("name"))
    return isinstance(value, str) and value in ("none", "auto", "required")


def dropped_transfer(value: Any) -> bool:
    """Admit what has no effect on an ordinary request: a client has no say in where a KV cache goes.

    Prompt ids are none of that: vLLM reads them in place of the messages. Nor does it take integers beyond 64 bits.
    """
    return isinstance(value, dict) and value.get("prompt_token_ids") is None and _fits_64_bits(value)


def _message(message: dict[str, Any]) -> bool:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not isinstance(message.get("name", ""), str):
        return False
    if content is None and "content" in message:
        # vLLM (openai's types) knows an empty content of these two only.
        return role in ("assistant", "function") and message.get("tool_calls", ()) is not None
    if isinstance(content, list):
        return all(isinstance(part, dict) and _text_part(part) for part in content)
    return content is None or isinstance(content, str)


def _text_part(part: dict[str, Any]) -> bool:
    # A part with a uuid is one of another kind to vLLM, whatever its type says.
    return part.get("type") == "text" and isinstance(part.get("text"), str) and part.get("uuid") is None


def _tool(tool: dict[str, Any]) -> bool:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        return False
    return (
        isinstance(function.get("name"), str)
        and isinstance(function.get("description"), str | None)
        and isinstance(function.get("parameters"), dict | None)
        and all(isinstance(flag, bool | None) for flag in (function.get("strict"), function.get("defer_loading")))
        and isinstance(tool.get("defer_loading"), bool | None)
    )


def _fits_64_bits(value: Any) -> bool:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, int) and not -_INT64 <= item < 2 * _INT64:
            return False
        if isinstance(item, dict | list):
            pending.extend(item.values() if isinstance(item, dict) else item)
    return True
