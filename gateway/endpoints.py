"""The OpenAI endpoints that the lane serves; all others are plain vLLM's."""

from enum import StrEnum


class Endpoint(StrEnum):
    """An endpoint's path."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
