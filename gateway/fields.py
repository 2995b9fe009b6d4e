"""The field table: each field of a chat completion and a completion, the leg it belongs to, and the values the lane serves.

An allow-list: a field that is not in the table, or a value that a row does not admit, sends the request to vLLM untouched. So a
field is never half-applied, and a value that vLLM refuses is refused by vLLM.
"""

from dataclasses import dataclass
from enum import Enum

from gateway import admits
from gateway.admits import Admits
from gateway.endpoints import Endpoint
from gateway.grammars import admits_response_format, admits_structured_outputs


class Leg(Enum):
    """Where a field's value goes."""

    PREFILL = "prefill"  # vLLM reads it, as it came: it shapes the prompt, or how vLLM treats the request
    DECODE = "decode"  # it shapes the answer after the first token
    BOTH = "both"  # the first token and all others
    NEITHER = "neither"  # dropped: only values without effect are admitted
    PLAIN = "plain"  # no value is served


@dataclass(frozen=True, slots=True)
class Row:
    """One field. `admits` tells whether the lane serves this (non-null) value exactly; a null means absent, or is refused."""

    leg: Leg
    admits: Admits
    nullable: bool = False


def _prefill(admit: Admits) -> Row:
    return Row(Leg.PREFILL, admit, nullable=True)


def _decode(admit: Admits) -> Row:
    return Row(Leg.DECODE, admit, nullable=True)


def _both(admit: Admits) -> Row:
    return Row(Leg.BOTH, admit, nullable=True)


def _neither(admit: Admits) -> Row:
    return Row(Leg.NEITHER, admit, nullable=True)


_PLAIN = Row(Leg.PLAIN, admits.nothing, nullable=True)
_IGNORED = _prefill(admits.anything)  # by vLLM, whatever its value: it is handed on for those who log it

_SHARED: dict[str, Row] = {
    # The prompt, and how vLLM treats the request.
    "model": _prefill(admits.name),
    "add_special_tokens": Row(Leg.PREFILL, admits.boolean),
    "cache_salt": _prefill(admits.salt),
    "user": _prefill(admits.text),
    "priority": Row(Leg.PREFILL, admits.int64),
    "request_id": Row(Leg.PREFILL, admits.text),
    "session_id": _prefill(admits.text),
    # How tokens are chosen.
    "temperature": _both(admits.number(0, 2)),
    "top_p": _both(admits.probability),
    "top_k": _both(admits.integer(-1, 2**31)),
    "min_p": _both(admits.number(0, 1)),
    "seed": _both(admits.int64),
    "presence_penalty": _both(admits.number(-2, 2)),
    "frequency_penalty": _both(admits.number(-2, 2)),
    "repetition_penalty": _both(admits.number(1e-30, 1e30)),  # with any logit, still a number in float32
    "logit_bias": _both(admits.token_biases),
    "allowed_token_ids": _both(admits.some_token_ids),
    "bad_words": Row(Leg.BOTH, admits.words),
    "stop_token_ids": _both(admits.token_ids),
    "min_tokens": Row(Leg.BOTH, admits.count),
    "ignore_eos": Row(Leg.BOTH, admits.boolean),
    "watermarking": _both(admits.only(False)),
    "response_format": _both(admits_response_format),
    "structured_outputs": _both(admits_structured_outputs),
    # Where the answer ends, and its form.
    "max_tokens": _decode(admits.positive),
    "stop": _decode(admits.stops),
    "include_stop_str_in_output": Row(Leg.DECODE, admits.boolean),
    "skip_special_tokens": Row(Leg.DECODE, admits.boolean),
    "spaces_between_special_tokens": Row(Leg.DECODE, admits.boolean),
    "stream": _decode(admits.boolean),
    "stream_options": _decode(admits.stream_options),
    "return_token_ids": _both(admits.boolean),
    "return_tokens_as_token_ids": _decode(admits.boolean),
    # Served when they ask for nothing.
    "kv_transfer_params": _neither(admits.dropped_transfer),
    "use_beam_search": Row(Leg.NEITHER, admits.only(False)),
    "length_penalty": Row(Leg.NEITHER, admits.is_number),  # of beam search
    "truncation_side": _neither(admits.only("left", "right")),  # of truncate_prompt_tokens
    "logprob_token_ids": _neither(admits.only([])),
    "ec_transfer_params": _neither(admits.only({})),
    "vllm_xargs": _neither(admits.only({})),
    "thinking_token_budget": _neither(admits.only(-1)),
    "stream_interval": _neither(admits.only(1)),
    "routed_experts_prompt_start": Row(Leg.NEITHER, admits.only(0)),
    "return_token_offsets": _neither(admits.boolean),  # of vLLM's render endpoints, as are the next two
    "mm_payload": Row(Leg.NEITHER, admits.only("tensors", "none")),
    "return_mm_kwargs": _neither(admits.boolean),
    "truncate_prompt_tokens": _PLAIN,
    "prompt_logprobs": _PLAIN,
    "repetition_detection": _PLAIN,
    # OpenAI's own.
    "metadata": _IGNORED,
    "store": _IGNORED,
    "service_tier": _IGNORED,
    "safety_identifier": _IGNORED,
    "prompt_cache_key": _IGNORED,
    "prompt_cache_options": _IGNORED,
    "prompt_cache_retention": _IGNORED,
}

_CHAT: dict[str, Row] = {
    "messages": Row(Leg.PREFILL, admits.messages),
    "add_generation_prompt": Row(Leg.PREFILL, admits.boolean),
    "continue_final_message": Row(Leg.PREFILL, admits.boolean),
    "documents": _prefill(admits.documents),
    "chat_template": _prefill(admits.text),
    "chat_template_kwargs": _prefill(admits.object_),
    "reasoning_effort": _prefill(admits.only("none", "minimal", "low", "medium", "high", "xhigh", "max")),
    "tools": _prefill(admits.tools),
    "tool_choice": _prefill(admits.tool_choice),
    "parallel_tool_calls": _prefill(admits.boolean),
    "include_reasoning": Row(Leg.PREFILL, admits.boolean),
    "return_prompt_text": _prefill(admits.boolean),
    "logprobs": _both(admits.boolean),
    "top_logprobs": _both(admits.logprobs),
    "max_completion_tokens": _decode(admits.positive),
    "n": _neither(admits.only(1)),
    "echo": Row(Leg.NEITHER, admits.only(False)),
    "media_io_kwargs": _neither(admits.only({})),
    "mm_processor_kwargs": _neither(admits.only({})),
    "verbosity": _IGNORED,
    "prediction": _IGNORED,
    "modalities": _neither(admits.only(["text"])),
    "audio": _PLAIN,
    "functions": _PLAIN,
    "function_call": _PLAIN,
    "moderation": _PLAIN,
    "web_search_options": _PLAIN,
}

_COMPLETIONS: dict[str, Row] = {
    "prompt": Row(Leg.PREFILL, admits.prompt),
    "logprobs": _both(admits.logprobs),
    "n": Row(Leg.NEITHER, admits.only(1)),
    "best_of": _neither(admits.only(1)),
    "echo": _neither(admits.only(False)),
    "suffix": _PLAIN,
    "prompt_embeds": _PLAIN,
    "max_completion_tokens": _neither(admits.anything),  # vLLM ignores it here
}

FIELDS: dict[Endpoint, dict[str, Row]] = {
    Endpoint.CHAT: _CHAT | _SHARED,
    Endpoint.COMPLETIONS: _COMPLETIONS | _SHARED,
}
"""The whole table: a row for each field of an endpoint."""
