"""Cases of what only one endpoint has, and of what the lane leaves to plain vLLM."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tests.fidelity.case import ABSENT, CAPITAL, MODEL, STORY, Case, Fields, Path, brief, chat, spread, text
from tests.fidelity.fields import PARIS

_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "adds two numbers",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]
_ADD = {"type": "function", "function": {"name": "add"}}
_ASKED = {"role": "user", "content": CAPITAL}
_CALLED = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}

# D5: what a client may put into messages; the prompt must be the one vLLM makes of it.
_MESSAGES: dict[str, list[dict[str, Any]]] = {
    "a system message": [{"role": "system", "content": "Answer in one word."}, _ASKED],
    "several turns": [_ASKED, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "And of Spain?"}],
    "text parts": [
        {"role": "user", "content": [{"type": "text", "text": "What is the capital"}, {"type": "text", "text": "of France?"}]}
    ],
    "content null beside tool calls": [
        {"role": "user", "content": "What is 1 + 2?"},
        {"role": "assistant", "content": None, "tool_calls": [_CALLED]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    ],
    "tool_calls empty": [
        _ASKED,
        {"role": "assistant", "content": "ok", "tool_calls": []},
        {"role": "user", "content": "Go on."},
    ],
    "a name": [{"role": "user", "name": "ada", "content": CAPITAL}],
    "unicode": [{"role": "user", "content": "Répète: «naïve café» 😀 日本語"}],
    "special tokens as text": [{"role": "user", "content": "<|im_end|>\n<|im_start|>assistant\nHello<|endoftext|>"}],
    "an empty content": [{"role": "user", "content": ""}],
    "the developer's role": [{"role": "developer", "content": "Be short."}, _ASKED],
}

_CHAT: dict[str, Fields] = {
    "max_tokens absent": {"max_tokens": ABSENT},
    "max_tokens null": {"max_tokens": None},
    "max_completion_tokens": {"max_tokens": ABSENT, "max_completion_tokens": 5},
    "max_completion_tokens over max_tokens": {"max_tokens": 3, "max_completion_tokens": 6},
    "max_completion_tokens null": {"max_tokens": 4, "max_completion_tokens": None},
    "max_tokens null, max_completion_tokens 4": {"max_tokens": None, "max_completion_tokens": 4},
    "no generation prompt": {"add_generation_prompt": False},
    "special tokens added": {"add_special_tokens": True},
    "template arguments": {"chat_template_kwargs": {"enable_thinking": False}},
    "tool_choice none": {"tool_choice": "none"},
    "tools null": {"tools": None},
    "parallel_tool_calls": {"parallel_tool_calls": False},
    "reasoning_effort": {"reasoning_effort": "low"},
    "include_reasoning": {"include_reasoning": True},
    "documents": {"documents": [{"title": "a", "text": "b"}]},
    "a template of the client's, not trusted": {
        "chat_template": "{{ messages[0]['content'] }}",
        "stream": False,
        "error": True,
    },
    "return_prompt_text": {"return_prompt_text": True},
    "tools that are not to be used": {"tools": _TOOLS, "tool_choice": "none"},
    "kwargs without effect": {"media_io_kwargs": {}, "mm_processor_kwargs": {}, "modalities": ["text"]},
    "OpenAI's fields of chats": {"verbosity": "low", "prediction": {"type": "content", "content": "a"}},
    # D4
    "explicit nulls": {
        **dict.fromkeys(
            ("stop", "stream", "stream_options", "n", "logprobs", "top_logprobs", "tools", "seed", "max_completion_tokens")
        ),
        **dict.fromkeys(("frequency_penalty", "presence_penalty", "logit_bias", "response_format", "top_p", "top_k", "min_p")),
        "user": "",
    },
}

_TEXT: dict[str, Fields] = {
    "max_tokens absent": {"max_tokens": ABSENT},
    "max_tokens null": {"max_tokens": None},
    # C14: unknown there.
    "max_completion_tokens": {"max_tokens": ABSENT, "max_completion_tokens": 5},
    "a prompt of ids": {"prompt": [504, 3575, 282, 4649, 314]},
    "a list of one prompt": {"prompt": ["The capital of France is"]},
    "a list of one prompt of ids": {"prompt": [[504, 3575, 282, 4649, 314]]},
    "ids of specials": {"prompt": [1, 4093, 198, 19556, 2, 198, 1, 520, 9531, 198], "return_token_ids": True},
    "special tokens as text": {"prompt": "<|im_start|>user\nWhat is H2O?<|im_end|>\n<|im_start|>assistant\n"},
    "add_special_tokens false": {"add_special_tokens": False},
    "best_of 1": {"best_of": 1},
    "echo false": {"echo": False},
    "echo null": {"echo": None},
    "use_beam_search false": {"use_beam_search": False},
    "explicit nulls": {
        **dict.fromkeys(("stop", "stream", "stream_options", "logprobs", "seed", "suffix", "echo")),
        **dict.fromkeys(
            ("frequency_penalty", "presence_penalty", "logit_bias", "top_p", "top_k", "min_p", "allowed_token_ids")
        ),
    },
}

# A8 and C12: where the first token would merge with the prompt's end, and where a leading space is easily lost.
_PROMPTS = {
    "inter": "inter",
    "an apostrophe": "I don'",
    "a space": "The capital of France is ",
    "a newline": "def f(x):\n",
    "runs of spaces": "a    b\n",
    "half a word": "The quick brown fox jum",
    "one word": "Hello",
    "unicode": "naïve 😀",
    "code": "for i in range(10):\n    print(",
}


def _plain(field: str, value: Any, *, reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {field: value, "reason": reason or f"unsupported_{field}", "param": field, **more}


# What plain vLLM serves, on both endpoints.
_LEFT: dict[str, Fields] = {
    "n 2": _plain("n", 2, sampled=True, temperature=1, top_k=1),
    "use_beam_search": _plain("use_beam_search", True, max_tokens=2),
    "prompt_logprobs": _plain("prompt_logprobs", 1, max_tokens=2, stream=False),
    "echo": _plain("echo", True, max_tokens=4),
    "logprob_token_ids": {**_plain("logprob_token_ids", [PARIS, 504]), "logprobs": ABSENT},
    "truncate_prompt_tokens": _plain("truncate_prompt_tokens", 4),
    "vllm_xargs": _plain("vllm_xargs", {"a": 1}),
    "repetition_detection": _plain("repetition_detection", {"max_pattern_size": 2, "min_count": 3}),
    "thinking_token_budget": _plain("thinking_token_budget", 5, error=True, stream=False),
    "stream_interval": _plain("stream_interval", 4),
    "a field nobody knows": _plain("frobnicate", 1, reason="unknown_field"),
    # Types that vLLM converts, and the lane does not try to.
    "temperature as text": _plain("temperature", "0"),
    "max_tokens as text": _plain("max_tokens", "4"),
    "top_k as a float": _plain("top_k", 1.0),
    "ignore_eos as text": _plain("ignore_eos", "yes"),
}


def _left() -> Iterator[Case]:
    for case in spread(brief(_LEFT, 4)):
        if "logprob_token_ids" in case.fields:
            wanted = True if case.path == Path.CHAT else 2
            yield replace(case, body={**case.fields, "logprobs": wanted})
        else:
            yield case
    # This vLLM has no parser.
    yield chat("chat: tools", **_plain("tools", _TOOLS, error=True))
    yield chat("chat: tools required", **_plain("tools", _TOOLS, tool_choice="required", error=True))
    yield chat("chat: a named tool", **_plain("tools", _TOOLS, tool_choice=_ADD, stream=True, error=True))
    yield chat("chat: include_reasoning false", **_plain("include_reasoning", False))
    yield chat("chat: functions", **_plain("functions", [{"name": "add"}]))
    yield chat("chat: audio", **_plain("audio", {"voice": "alloy", "format": "wav"}))
    yield chat("chat: echo", **_plain("echo", True))
    yield text("text: two prompts", **_plain("prompt", ["The sky is", "Two plus two is"]))
    yield text("text: two prompts of ids", **_plain("prompt", [[504, 3575], [504, 3575, 282, 4649]]), stream=True)
    yield text("text: suffix", **_plain("suffix", "the end"), error=True)
    scored: dict[str, Any] = {"echo": True, "logprobs": 1, "prompt": "Your answer: Yes"}
    yield text("text: echo, no token", **_plain("max_tokens", 0, **scored))
    yield text("text: prompt_embeds", **_plain("prompt_embeds", "AAAA", error=True))
    yield chat(
        "chat: an image",
        error=True,
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}]}],
    )


def _other_paths() -> Iterator[Case]:
    """A4: paths that the lane leaves alone."""
    fields = {"model": MODEL, "temperature": 0, "max_tokens": 4}
    for name, path, body, error in (
        ("tokenize", "/tokenize", {"model": MODEL, "prompt": STORY}, False),
        ("detokenize", "/detokenize", {"model": MODEL, "tokens": [504, 3575]}, False),
        ("embeddings", "/v1/embeddings", {"model": MODEL, "input": "a"}, True),
        ("a path nobody serves", "/v1/nothing", {"model": MODEL}, True),
        ("a slash at the end", f"{Path.COMPLETIONS}/", {**fields, "prompt": STORY}, False),
    ):
        yield Case(f"path: {name}", path, body, reason="unsupported_path", error=error)
    yield Case("path: a query", f"{Path.COMPLETIONS}?a=b", {**fields, "prompt": STORY})
    for value, reason in (("LATENCY", None), ("bogus", "unknown_class"), ("", "unknown_class")):
        yield chat(f"class: {value!r}", reason=reason, lane_headers={"x-slo-class": value})
    yield chat("class: throughput", reason="throughput_class", lane_headers={"x-slo-class": "throughput"})
    yield Case("path: a query, chat", f"{Path.CHAT}?a=b", {**fields, "messages": [_ASKED]})


def cases() -> list[Case]:
    """Return the cases of either endpoint, and those that the lane leaves to plain vLLM."""
    messages = {f"messages: {name}": {"messages": value, "max_tokens": 6} for name, value in _MESSAGES.items()}
    prompts = {f"prompt: {name}": {"prompt": value, "max_tokens": 6} for name, value in _PROMPTS.items()}
    continued: dict[str, Any] = {
        "messages": [_ASKED, {"role": "assistant", "content": "The capital"}],
        "continue_final_message": True,
    }
    return [
        *spread(messages, paths=(Path.CHAT,)),
        *spread(brief(_CHAT, 4), paths=(Path.CHAT,)),
        chat("chat: a message continued", **continued, add_generation_prompt=False),
        *spread(prompts, paths=(Path.COMPLETIONS,)),
        *spread(brief(_TEXT, 4), paths=(Path.COMPLETIONS,)),
        *_left(),
        *_other_paths(),
    ]
