"""vLLM's own answers to tokens that a test chooses: its output processor and its serving classes, without an engine."""

import asyncio
import json
import time
import warnings
from collections.abc import AsyncIterator, Container, Iterable, Iterator, Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from gateway.endpoints import Endpoint
from gateway.sse import EventReader
from gateway.tokens import TokenLogprobs
from tests.kit.gateway import MODEL
from tests.kit.scripts import LIMIT, Script, card_of


@cache
def vllm() -> SimpleNamespace:
    """Its own classes, read once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import PreTrainedTokenizerFast
        from vllm.entrypoints.openai.chat_completion import protocol as chat
        from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
        from vllm.entrypoints.openai.completion import protocol as completion
        from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
        from vllm.v1 import engine
        from vllm.v1.core.sched.utils import check_stop
        from vllm.v1.engine.output_processor import OutputProcessor
        from vllm.v1.metrics.stats import PrefillStats
        from vllm.v1.outputs import LogprobsLists
        from vllm.v1.request import RequestStatus
    return SimpleNamespace(
        Tokenizer=PreTrainedTokenizerFast,
        requests={Endpoint.CHAT: chat.ChatCompletionRequest, Endpoint.COMPLETIONS: completion.CompletionRequest},
        servings={Endpoint.CHAT: OpenAIServingChat, Endpoint.COMPLETIONS: OpenAIServingCompletion},
        answers={Endpoint.CHAT: chat.ChatCompletionResponse, Endpoint.COMPLETIONS: completion.CompletionResponse},
        engine=engine,
        check_stop=check_stop,
        OutputProcessor=OutputProcessor,
        PrefillStats=PrefillStats,
        LogprobsLists=LogprobsLists,
        RequestStatus=RequestStatus,
    )


@cache
def _wrapped(tokenizer: Tokenizer) -> Any:
    return vllm().Tokenizer(tokenizer_object=tokenizer)


def _request(endpoint: Endpoint, fields: Mapping[str, Any]) -> Any:
    messages = [{"role": "user", "content": "hello"}]
    prompt = {"messages": messages} if endpoint is Endpoint.CHAT else {"prompt": "hello", "max_tokens": LIMIT}
    return vllm().requests[endpoint](**{"model": MODEL, **prompt, **fields})


def _serving(endpoint: Endpoint, fingerprint: str | None) -> Any:
    """A serving object that has what writing an answer takes, and no engine."""
    serving = object.__new__(vllm().servings[endpoint])
    vars(serving).update(
        parser_cls=None,
        response_role="assistant",
        system_fingerprint=fingerprint,
        return_tokens_as_token_ids=False,
        enable_auto_tools=False,
        enable_force_include_usage=False,
        enable_prompt_tokens_details=True,
        enable_per_request_metrics=False,
        enable_log_outputs=False,
        request_logger=None,
        _include_reasoning_tokens_details=False,
    )
    return serving


def _outputs(script: Script, request: Any, limit: int, handed: dict[str, Any] | None = None) -> Iterator[Any]:
    """What vLLM's output processor makes of the script, one token at a time, up to the answer's end."""
    model, parts = card_of(script.tokenizer), vllm()
    params = request.to_sampling_params(limit, {})
    params.update_from_generation_config({"eos_token_id": list(model.stop_token_ids)}, model.eos_token_id)
    processor = parts.OutputProcessor(_wrapped(script.tokenizer), log_stats=False)
    processor.add_request(
        parts.engine.EngineCoreRequest(
            request_id="1",
            external_req_id="1",
            prompt_token_ids=list(script.prompt),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        ),
        script.prompt_text,
    )
    for index, token in enumerate(script.ids):
        scheduled = SimpleNamespace(
            pooling_params=None,
            sampling_params=params,
            output_token_ids=script.ids[: index + 1],
            num_output_tokens=index + 1,
            num_tokens=len(script.prompt) + index + 1,
            max_tokens=params.max_tokens,
            status=parts.RequestStatus.RUNNING,
            stop_reason=None,
        )
        ended = parts.check_stop(scheduled, model.context_tokens)
        output = parts.engine.EngineCoreOutput(
            request_id="1",
            new_token_ids=[token],
            new_logprobs=_lists(token, script.logprobs[index]) if params.logprobs is not None else None,
            finish_reason=parts.RequestStatus.get_finished_reason(scheduled.status) if ended else None,
            stop_reason=scheduled.stop_reason,
            kv_transfer_params=handed if ended else None,
            prefill_stats=parts.PrefillStats() if index == 0 else None,
        )
        told = processor.process_outputs([output])
        yield from told.request_outputs
        if ended or told.reqs_to_abort:
            return
    raise AssertionError("the script is no whole answer")


def _lists(token: int, told: TokenLogprobs) -> Any:
    """A sampler's row: the chosen token first, then the most probable ones."""
    ids, values = zip((token, told.logprob), *told.top, strict=True)
    return vllm().LogprobsLists(np.array([ids]), np.array([values], dtype=np.float32), np.array([1]))


def vllm_stream(endpoint: Endpoint, fields: Mapping[str, Any], script: Script, at: Iterable[int] | None = None) -> list[Any]:
    """The events of vLLM's own stream, parsed; [DONE] as it is.

    A chunk for each token, or chunks that end after so many tokens: what vLLM sends when its clients are slow.
    """
    request, serving = _request(endpoint, {**fields, "stream": True}), _serving(endpoint, script.fingerprint)
    outputs = _outputs(script, request, fields.get("max_tokens", LIMIT))
    results = _merged(outputs, range(len(script.ids)) if at is None else set(at))
    tokenizer, metadata = _wrapped(script.tokenizer), SimpleNamespace()
    if endpoint is Endpoint.CHAT:
        chunks = serving.chat_completion_stream_generator(request, _each(results), "id-1", MODEL, [], tokenizer, metadata)
    else:
        numbered = _each((0, result) for result in results)
        chunks = serving.completion_stream_generator(
            request, [], numbered, "id-1", int(time.time()), MODEL, 1, tokenizer, metadata
        )
    return parsed("".join(asyncio.run(_all(chunks))).encode())


def vllm_whole(endpoint: Endpoint, fields: Mapping[str, Any], script: Script, handed: dict[str, Any] | None = None) -> Any:
    """vLLM's own answer that does not stream, parsed; with what its connector hands to the gateway."""
    request, serving = _request(endpoint, fields), _serving(endpoint, script.fingerprint)
    tokenizer, metadata = _wrapped(script.tokenizer), SimpleNamespace()
    if endpoint is Endpoint.CHAT:
        results = _each(_outputs(script, request, fields.get("max_tokens", LIMIT), handed))
        writing = serving.chat_completion_full_generator(request, results, "id-1", MODEL, [], tokenizer, metadata)
        answer = asyncio.run(writing)
    else:
        *_, last = _outputs(script, request, fields.get("max_tokens", LIMIT), handed)
        answer = serving.request_output_to_completion_response(
            [last], request, "id-1", int(time.time()), MODEL, tokenizer, metadata
        )
    # As vLLM's routes do: every field, nulls included.
    return json.loads(json.dumps(answer.model_dump(), allow_nan=False))


def _merged(outputs: Iterable[Any], at: Container[int]) -> Iterator[Any]:
    """Outputs of one token each put together, as vLLM's collector does, to end at these counts."""
    waiting: Any = None
    for count, output in enumerate(outputs, start=1):
        if waiting is None:
            waiting = output
        else:
            waiting.add(output, aggregate=True)
        if count in at:
            yield waiting
            waiting = None
    if waiting is not None:
        yield waiting


async def _each(values: Iterable[Any]) -> AsyncIterator[Any]:
    for value in values:
        yield value


async def _all(values: AsyncIterator[str]) -> list[str]:
    return [value async for value in values]


def parsed(stream: bytes) -> list[Any]:
    """Events as objects; [DONE] as it is."""
    return [event.decode() if event == b"[DONE]" else json.loads(event) for event in EventReader().feed(stream)]


def untimed(value: Any) -> Any:
    """Without what no two answers share: when they were made."""
    if isinstance(value, dict):
        return {name: 0 if name == "created" else untimed(member) for name, member in value.items()}
    return [untimed(member) for member in value] if isinstance(value, list) else value
