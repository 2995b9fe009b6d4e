"""A request's prompt: the ids that it is, bounds of its length, and how vLLM is asked for the rest."""

from dataclasses import dataclass
from typing import Any

from gateway.body import Body
from gateway.endpoints import Endpoint

_TOKENIZED = {
    Endpoint.CHAT: [
        "messages",
        "model",
        "add_generation_prompt",
        "continue_final_message",
        "add_special_tokens",
        "chat_template",
        "chat_template_kwargs",
        "tools",
    ],
    Endpoint.COMPLETIONS: ["prompt", "model", "add_special_tokens"],
}
"""Fields of an endpoint that vLLM's /tokenize knows (entrypoints/serve/tokenize/protocol.py)."""


@dataclass(frozen=True, slots=True)
class PromptBounds:
    """How many tokens a prompt has: between these; `most` is None where only vLLM can tell."""

    fewest: int
    most: int | None


def prompt_ids(body: Body) -> list[int] | None:
    """Return the token ids that a completion brings; None where its prompt is text."""
    prompt = _one(body.get("prompt"))
    return None if isinstance(prompt, str) else prompt


def prompt_bounds(endpoint: Endpoint, body: Body, *, longest_token: int, template_tokens: int) -> PromptBounds:
    """Return what a body says of its prompt's length; expects one that `why_not` has nothing against.

    No token is shorter than a byte, or longer than the vocabulary's longest, which has `longest_token` characters;
    `template_tokens` bounds what a chat template or the tokenizer adds.
    """
    if endpoint is Endpoint.COMPLETIONS:
        ids = prompt_ids(body)
        if ids is not None:
            return PromptBounds(len(ids), len(ids))
        text = _one(body.get("prompt"))
        return PromptBounds(len(text) // longest_token, len(text.encode()) + template_tokens)
    if _own_template(body):
        return PromptBounds(0, None)  # it may leave out or repeat what it likes
    return PromptBounds(_characters(body.get("messages")) // longest_token, len(body.raw) + template_tokens)


def tokenize_body(endpoint: Endpoint, body: Body) -> bytes:
    """Return the body with which vLLM's /tokenize makes the request's own prompt; expects one whose prompt is text."""
    extra = _unwrapped(body) if endpoint is Endpoint.COMPLETIONS else _template_arguments(body)
    return body.with_members([key for key in _TOKENIZED[endpoint] if key not in extra], extra)


def _one(prompt: Any) -> Any:
    """Take the only prompt out of a list of one."""
    return prompt[0] if isinstance(prompt, list) and isinstance(prompt[0], str | list) else prompt


def _own_template(body: Body) -> bool:
    arguments = body.get("chat_template_kwargs") or {}
    return body.get("chat_template") is not None or arguments.get("chat_template") is not None


def _characters(messages: list[dict[str, Any]]) -> int:
    contents = [message.get("content") for message in messages]
    parts = [part["text"] for content in contents if isinstance(content, list) for part in content]
    return sum(len(text) for text in [*contents, *parts] if isinstance(text, str))


def _unwrapped(body: Body) -> dict[str, Any]:
    prompt = body.get("prompt")
    return {} if isinstance(prompt, str) else {"prompt": _one(prompt)}


def _template_arguments(body: Body) -> dict[str, Any]:
    """Return the template's arguments with those that a chat completion names outside, which /tokenize does not know."""
    outside = {key: value for key in ("documents", "reasoning_effort") if (value := body.get(key)) is not None}
    if not outside:
        return {}
    own = body.get("chat_template_kwargs") or {}
    if "reasoning_effort" in outside:
        # As vLLM does for templates that must be told (ChatCompletionRequest.build_chat_params).
        own = {"enable_thinking": outside["reasoning_effort"] != "none"} | own
    return {"chat_template_kwargs": own | outside}
