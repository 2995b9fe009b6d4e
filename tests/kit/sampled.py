"""vLLM's own sampling parameters of a request, and a plan held against them."""

import json
import warnings
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

from gateway.cards import Defaults
from gateway.endpoints import Endpoint
from gateway.grammars import Grammar
from gateway.plan import Plan
from tests.kit.gateway import bpe_tokenizer

_CONTEXT = 2**40  # tokens; the rest of it is what a plan without a limit means


def vllms_request(oracle: SimpleNamespace, endpoint: Endpoint, raw: dict[str, Any]) -> Any:
    """vLLM's request; raises what vLLM raises."""
    kind = oracle.chat.ChatCompletionRequest if endpoint is Endpoint.CHAT else oracle.CompletionRequest
    return kind.model_validate(raw)


def vllms_params(theirs: Any, endpoint: Endpoint, defaults: Defaults) -> Any:
    """What vLLM samples a request with: its server's part is done too, and its engine has found nothing wrong."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.entrypoints.serve.utils.api_utils import get_max_tokens

        configured = {key: value for key, value in asdict(defaults).items() if value is not None}
        chat = endpoint is Endpoint.CHAT
        asked = theirs.max_completion_tokens if chat and theirs.max_completion_tokens is not None else theirs.max_tokens
        params = theirs.to_sampling_params(get_max_tokens(_CONTEXT, asked, 0, configured), configured)
    tokenizer = bpe_tokenizer()
    vocab_size = tokenizer.get_vocab_size()
    params.verify(
        SimpleNamespace(max_logprobs=20, get_vocab_size=lambda: vocab_size, is_diffusion=False), None, None, tokenizer
    )
    params.update_from_tokenizer(
        SimpleNamespace(encode=lambda text, **options: tokenizer.encode(text, **options).ids, max_token_id=vocab_size - 1)
    )
    return params


def sampled_alike(params: Any, plan: Plan) -> None:
    """Assert that a plan says what vLLM's parameters say."""
    sampling, form = plan.sampling, plan.form
    for name in ("temperature", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        assert getattr(sampling, name) == getattr(params, name), name
    assert sampling.top_k == max(0, params.top_k)  # vLLM takes -1 and 0 alike
    assert dict(sampling.logit_bias) == (params.logit_bias or {})
    assert sampling.allowed_token_ids == tuple(dict.fromkeys(params.allowed_token_ids or ()))  # a set, to vLLM
    assert list(sampling.bad_words) == params.bad_words
    assert list(map(list, sampling.bad_word_ids)) == (params.bad_words_token_ids or [])
    assert list(sampling.stop_token_ids) == params.stop_token_ids
    assert (sampling.min_tokens, sampling.ignore_eos, sampling.logprobs) == (
        params.min_tokens,
        params.ignore_eos,
        params.logprobs,
    )
    assert (plan.max_tokens or _CONTEXT) == params.max_tokens
    assert list(form.stop) == params.stop
    assert form.include_stop is params.include_stop_str_in_output
    assert form.skip_special_tokens is params.skip_special_tokens
    assert form.spaces_between_special_tokens is params.spaces_between_special_tokens
    assert form.stream is (params.output_kind.name == "DELTA")
    assert (params.n, params.prompt_logprobs, params.num_logprobs) == (1, None, params.logprobs)
    assert (params.repetition_detection, params.thinking_token_budget, params.extra_args or {}) == (None, None, {})
    _constrained_alike(params.structured_outputs, plan.grammar)


def _constrained_alike(theirs: Any, grammar: Grammar | None) -> None:
    from vllm.v1.structured_output.request import get_structured_output_key

    if theirs is None:
        assert grammar is None
        return
    assert grammar is not None
    kind, source = get_structured_output_key(theirs)
    assert {"JSON": "JSON_SCHEMA", "GRAMMAR": "EBNF"}.get(kind.name, kind.name) == grammar.kind.value
    written = kind.name in ("JSON", "STRUCTURAL_TAG", "CHOICE")
    assert (json.loads(source) if written else source) == (json.loads(grammar.source) if written else grammar.source)
    plain = (theirs.disable_any_whitespace, theirs.disable_additional_properties, theirs.whitespace_pattern)
    assert plain == (False, False, None)
