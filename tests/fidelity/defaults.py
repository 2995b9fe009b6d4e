"""Cases for a model that has generation defaults: what a request leaves open is the model's to say, on both legs."""

from typing import Any

from tests.fidelity.case import ABSENT, Case, Fields, Path, spread
from tests.fidelity.fields import END, ENDOFTEXT, PARIS

DEFAULTS: dict[str, Any] = {
    # One token is left to draw from: a request that leaves everything open has one answer only.
    "temperature": 0.6,
    "top_k": 1,
    "repetition_penalty": 1.15,
    "max_new_tokens": 48,
    "eos_token_id": [END, ENDOFTEXT],
    "bos_token_id": 1,
    "pad_token_id": END,
}
"""The model's generation_config.json."""

_OPEN: dict[str, Any] = {"temperature": ABSENT, "max_tokens": ABSENT}
_TABLE: dict[str, Fields] = {
    "everything open": _OPEN,
    "everything null": {"temperature": None, "max_tokens": None, "top_k": None, "top_p": None, "repetition_penalty": None},
    "another temperature": {**_OPEN, "temperature": 1.2, "max_tokens": 12},
    "another penalty": {**_OPEN, "repetition_penalty": 1.0, "max_tokens": 16},
    "another top_k": {"top_k": 0, "max_tokens": 12},
    "a penalty more": {**_OPEN, "presence_penalty": 1.0, "max_tokens": 16},
    "more than the model's limit": {**_OPEN, "max_tokens": 52, "ignore_eos": True},
    "the second eos": {**_OPEN, "allowed_token_ids": [ENDOFTEXT]},
    "the second eos, shown": {
        **_OPEN,
        "allowed_token_ids": [ENDOFTEXT],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "return_token_ids": True,
    },
    "the second eos, ignored": {"allowed_token_ids": [ENDOFTEXT], "ignore_eos": True, "max_tokens": 4},
    "the second eos, too early": {"allowed_token_ids": [ENDOFTEXT, END, PARIS], "min_tokens": 3, "max_tokens": 6},
    "the second eos, asked for": {"allowed_token_ids": [ENDOFTEXT], "stop_token_ids": [ENDOFTEXT], "logprobs": ABSENT},
    "a choice": {**_OPEN, "structured_outputs": {"choice": ["London", "Paris"]}},
}

# A9: the prompt is another one each time it is rendered, and tokens after it can only be those of the one that was prefilled.
_CLOCK: dict[str, Any] = {"chat_template_kwargs": {"clock": True}, "allowed_token_ids": [PARIS], "max_tokens": 4}


def cases() -> list[Case]:
    """Return the cases."""
    table = spread({f"defaults: {name}": fields for name, fields in _TABLE.items()})
    return [*table, *spread({"a template that reads the clock": _CLOCK}, paths=(Path.CHAT,), streaming="both")]
