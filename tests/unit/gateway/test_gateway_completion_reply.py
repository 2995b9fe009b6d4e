"""The client's completion, judged by the openai client's types and by vLLM's own classes."""

import json
from itertools import product
from typing import Any

import pytest
from openai.types import Completion

from gateway.endpoints import Endpoint
from gateway.errors import UpstreamFailed
from gateway.reply import read_prefill_answer, stream_writer
from gateway.tokens import Batch, TokenLogprobs
from tests.kit.gateway import ids_of
from tests.kit.lane_replies import cut, lane_of, lane_stream, lane_whole, one_by_one, prefill_leg, whole_batch
from tests.kit.scripts import Script, byte_tokenizer, id_of
from tests.kit.vllm_replies import parsed, untimed, vllm_stream, vllm_whole

TEXT = 'He said "née\n🙂", and left.\u2028\\'
IDS = tuple(ids_of(TEXT))
END, TURN = id_of(byte_tokenizer(), "<end>"), id_of(byte_tokenizer(), "<turn>")
OTHERS = tuple(zip(ids_of("@#"), (-(2.0**-15), -0.125), strict=True))
USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
CONTINUOUS: dict[str, Any] = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def script(ending: int | None = END, alternatives: int | None = None, fingerprint: str | None = "fp-1") -> Script:
    """The text, and how a model ends it; None: it would go on."""
    ids = IDS if ending is None else (*IDS, ending)
    top = OTHERS[: alternatives or 0]
    logprobs = () if alternatives is None else tuple(TokenLogprobs(-0.25 * index, top) for index in range(len(ids)))
    return Script(ids, logprobs, fingerprint=fingerprint)


def stream(told: Script, **fields: Any) -> list[Any]:
    """All events of an answer in three batches."""
    lane = lane_of(Endpoint.COMPLETIONS, {"max_tokens": len(told.ids), **fields}, told)
    return lane_stream(lane, cut(whole_batch(told, lane.plan), (1, len(IDS))))


def whole(told: Script, **fields: Any) -> Any:
    lane = lane_of(Endpoint.COMPLETIONS, {"max_tokens": len(told.ids), **fields}, told)
    return lane_whole(lane, cut(whole_batch(told, lane.plan), (1, len(IDS))))


@pytest.mark.parametrize(("ending", "finish"), [(END, "stop"), (None, "length")])
@pytest.mark.parametrize("options", [{}, USAGE, CONTINUOUS])
def test_a_stream_is_one_answer(ending: int | None, finish: str, options: dict[str, Any]) -> None:
    sent = stream(script(ending), **options)
    # The openai client reads chunks without validating: a finish_reason is null until the last.
    chunks = [Completion.construct(**event) for event in sent[:-1]]
    assert sent[-1] == "[DONE]"
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    choices = [event["choices"][0] for event in sent[:-1] if event["choices"]]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [finish]
    assert "".join(choice["text"] for choice in choices) == TEXT
    assert len(choices) == 3 - (ending is None), "no chunk before the first token"


COMBINATIONS = list(
    product(
        [{}, USAGE, CONTINUOUS],
        [{}, {"logprobs": 0}, {"logprobs": 2}, {"logprobs": 1, "return_tokens_as_token_ids": True}],
        [{}, {"return_token_ids": True}],
        [{}, {"stop": "née"}, {"stop": ["left", "zzzz"], "include_stop_str_in_output": True}],
    )
)


@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda parts: str({k: v for part in parts for k, v in part.items()}))
def test_every_combination_is_written_as_vllm_writes_it(combination: tuple[dict[str, Any], ...]) -> None:
    fields = {name: value for part in combination for name, value in part.items()}
    for ending, fingerprint in ((END, "fp-1"), (None, None), (TURN, "fp-1")):
        told = script(ending, fields.get("logprobs"), fingerprint)
        asked = {"max_tokens": len(told.ids), **fields}
        lane = lane_of(Endpoint.COMPLETIONS, asked, told)
        sent = lane_stream(lane, one_by_one(whole_batch(told, lane.plan)))
        assert listed(sent) == listed(vllm_stream(Endpoint.COMPLETIONS, asked, told))
        asked.pop("stream_options", None)
        lane = lane_of(Endpoint.COMPLETIONS, asked, told)
        answer = lane_whole(lane, one_by_one(whole_batch(told, lane.plan)))
        assert listed(answer) == listed(vllm_whole(Endpoint.COMPLETIONS, asked, told))


def listed(value: Any) -> str:
    """As JSON: nulls, order and all."""
    return json.dumps(untimed(value), indent=1)


def test_a_whole_answer_is_one_that_the_openai_client_reads() -> None:
    answer = Completion.model_validate(whole(script(alternatives=2), logprobs=2))
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (TEXT, "stop")
    assert choice.logprobs is not None
    assert len(choice.logprobs.tokens or ()) == len(IDS) + 1
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(IDS) + 1


def test_no_alternatives_are_not_no_logprobs() -> None:
    (choice,) = whole(script(alternatives=0), logprobs=0)["choices"]
    assert len(choice["logprobs"]["token_logprobs"]) == len(IDS) + 1
    assert all(len(top) == 1 for top in choice["logprobs"]["top_logprobs"])


def test_offsets_go_on_over_the_chunks_of_a_stream() -> None:
    sent = stream(script(alternatives=0), logprobs=0)
    logprobs = [event["choices"][0]["logprobs"] for event in sent[:-1]]
    offsets = [offset for each in logprobs for offset in each["text_offset"]]
    tokens = [token for each in logprobs for token in each["tokens"]]
    assert offsets == [len("".join(tokens[:index])) for index in range(len(tokens))]


def test_the_prompts_ids_are_in_the_first_chunk_only() -> None:
    told = script()
    ids = [event["choices"][0]["prompt_token_ids"] for event in stream(told, return_token_ids=True)[:-1]]
    assert ids == [list(told.prompt), None, None]


def test_the_client_sees_nothing_of_the_handoff() -> None:
    assert prefill_leg(Endpoint.COMPLETIONS, {}, script())["kv_transfer_params"] is not None
    assert whole(script())["kv_transfer_params"] is None


def test_what_vllm_tells_of_the_first_token_and_the_prompt_is_read() -> None:
    told = script(alternatives=2)
    leg = prefill_leg(Endpoint.COMPLETIONS, {"logprobs": 2, "return_token_ids": True}, told)
    prefill = read_prefill_answer(Endpoint.COMPLETIONS, json.dumps(leg).encode())
    (first,) = prefill.logprobs
    assert first.logprob == told.logprobs[0].logprob
    assert first.top == ((IDS[0], first.logprob), *OTHERS), "the token itself is among them"
    assert prefill.prompt_token_ids == list(told.prompt)
    assert (prefill.finished, prefill.role) == (False, "")


def test_an_error_in_mid_stream_is_one_event_and_no_done_follows() -> None:
    lane = lane_of(Endpoint.COMPLETIONS, {}, script())
    writer = stream_writer(lane.plan, lane.prefill, lane.state)
    sent = parsed(writer.begin() + writer.write(Batch(IDS[:1])) + writer.fail(UpstreamFailed("lost", code="decode_lost")))
    assert [list(event) for event in sent] == [["id", "object", "created", "model", "choices"], ["error"]]


@pytest.mark.parametrize("text", [None, 1, ["a"]])
def test_a_choice_without_text_is_refused(text: Any) -> None:
    leg = prefill_leg(Endpoint.COMPLETIONS, {}, script())
    leg["choices"][0]["text"] = text
    with pytest.raises(ValueError):
        read_prefill_answer(Endpoint.COMPLETIONS, json.dumps(leg).encode())
