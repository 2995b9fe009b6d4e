"""A prompt's length before anybody tokenized it, and how vLLM is asked to."""

import json
import warnings
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.body import Body
from gateway.eligibility import why_not
from gateway.endpoints import Endpoint
from gateway.prompts import PromptBounds, prompt_bounds, prompt_ids, tokenize_body
from tests.kit.fields import CHAT, COMPLETIONS, TOOL, request
from tests.kit.gateway import bpe_tokenizer, card

LONGEST = card().longest_token


def asked(endpoint: Endpoint, **fields: Any) -> Body:
    body = Body(json.dumps(request(endpoint, **fields)).encode())
    assert why_not(endpoint, body, tools=True) is None
    return body


def bounds(endpoint: Endpoint, longest_token: int = 4, **fields: Any) -> PromptBounds:
    return prompt_bounds(endpoint, asked(endpoint, **fields), longest_token=longest_token, template_tokens=10)


def test_characters_are_those_of_all_texts() -> None:
    messages = [
        {"role": "system", "content": "naïve 🙂"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]},
        {"role": "user"},
    ]
    found = bounds(CHAT, 1, messages=messages)
    assert found.fewest == 7 + 3
    assert found.most == len(asked(CHAT, messages=messages).raw) + 10


@pytest.mark.parametrize("own", [{"chat_template": "{{ messages }}"}, {"chat_template_kwargs": {"chat_template": "x"}}])
def test_of_a_clients_own_template_only_vllm_knows_what_it_makes(own: dict[str, Any]) -> None:
    assert bounds(CHAT, **own) == PromptBounds(0, None)


@pytest.mark.parametrize("prompt", [[1, 2, 3], [[1, 2, 3]]])
def test_token_ids_are_counted_exactly(prompt: Any) -> None:
    assert prompt_ids(asked(COMPLETIONS, prompt=prompt)) == [1, 2, 3]
    assert bounds(COMPLETIONS, prompt=prompt) == PromptBounds(3, 3)


@pytest.mark.parametrize("prompt", ["naïve 🙂", ["naïve 🙂"]])
def test_a_text_has_tokens_of_a_byte_at_least_and_of_the_longest_at_most(prompt: Any) -> None:
    assert prompt_ids(asked(COMPLETIONS, prompt=prompt)) is None
    assert bounds(COMPLETIONS, prompt=prompt) == PromptBounds(7 // 4, 11 + 10)


@given(st.text(min_size=1))
def test_the_tokens_of_a_text_lie_between_its_bounds(text: str) -> None:
    found = prompt_bounds(COMPLETIONS, asked(COMPLETIONS, prompt=text), longest_token=LONGEST, template_tokens=0)
    assert found.most is not None
    assert found.fewest <= len(bpe_tokenizer().encode(text).ids) <= found.most


# --- asking vLLM ---


def test_what_a_chats_prompt_is_made_of_goes_to_tokenize_byte_for_byte() -> None:
    fields = (
        '"messages":[ {"role":"user","content":"\\u00e9"} ],"chat_template_kwargs" :{"a": 1.50},"add_generation_prompt":true'
    )
    body = Body(f'{{"model":"m",{fields},"temperature":0.5,"cache_salt":"s","max_tokens":5}}'.encode())
    assert tokenize_body(CHAT, body).count(b'"\\u00e9"') == 1
    assert b'"chat_template_kwargs" :{"a": 1.50}' in tokenize_body(CHAT, body)
    assert json.loads(tokenize_body(CHAT, body)) == json.loads(f'{{"model":"m",{fields}}}')


@pytest.mark.parametrize("prompt", ["a é", ["a é"]])
def test_a_completions_text_goes_to_tokenize_alone(prompt: Any) -> None:
    sent = json.loads(tokenize_body(COMPLETIONS, asked(COMPLETIONS, prompt=prompt, add_special_tokens=False, seed=1)))
    assert sent == {"model": "m", "prompt": "a é", "add_special_tokens": False}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": [TOOL]},
        {"chat_template": "{{ x }}", "chat_template_kwargs": {"x": 1}},
        {"documents": [{"text": "t"}]},
        {"documents": []},
        {"reasoning_effort": "none"},
        {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "low"}},
        {"add_generation_prompt": False, "continue_final_message": True, "add_special_tokens": True},
    ],
)
def test_vllm_tokenizes_the_prompt_that_it_would_generate_from(fields: dict[str, Any]) -> None:
    """vLLM hands its template the same arguments for both requests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest

    body = asked(CHAT, **fields)
    generated = ChatCompletionRequest.model_validate(json.loads(body.raw))
    tokenized = TokenizeChatRequest.model_validate(json.loads(tokenize_body(CHAT, body)))
    theirs, ours = generated.build_chat_params("default", "auto"), tokenized.build_chat_params("default", "auto")
    assert (ours.chat_template, ours.chat_template_kwargs) == (theirs.chat_template, theirs.chat_template_kwargs)
    assert (tokenized.messages, tokenized.tools) == (generated.messages, generated.tools)
    assert tokenized.add_special_tokens is generated.add_special_tokens
