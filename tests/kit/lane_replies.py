"""The lane's answers to tokens that a test chooses, from vLLM's own answer to the same prefill leg."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.endpoints import Endpoint
from gateway.plan import Form, Plan, Sampling
from gateway.reply import AnswerState, PrefillAnswer, json_writer, read_prefill_answer, stream_writer
from gateway.tokens import Batch
from tests.kit.gateway import MODEL
from tests.kit.scripts import LIMIT, PROMPT_TAIL, Script, card_of
from tests.kit.vllm_replies import parsed, vllm_whole


def plan_of(endpoint: Endpoint, fields: Mapping[str, Any]) -> Plan:
    """The plan of a request, for the fields that a writer reads."""
    options = fields.get("stream_options", {})
    stop = fields.get("stop", ())
    logprobs = fields.get("logprobs")
    if endpoint is Endpoint.CHAT:
        logprobs = fields.get("top_logprobs", 0) if logprobs else None
    return Plan(
        endpoint=endpoint,
        model=MODEL,
        sampling=Sampling(
            temperature=0.0,
            min_tokens=fields.get("min_tokens", 0),
            ignore_eos=fields.get("ignore_eos", False),
            stop_token_ids=tuple(fields.get("stop_token_ids", ())),
            logprobs=logprobs,
        ),
        form=Form(
            stream=fields.get("stream", False),
            include_usage=bool(options.get("include_usage")),
            continuous_usage=bool(options.get("include_usage") and options.get("continuous_usage_stats")),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            include_stop=fields.get("include_stop_str_in_output", False),
            skip_special_tokens=fields.get("skip_special_tokens", True),
            spaces_between_special_tokens=fields.get("spaces_between_special_tokens", True),
            return_token_ids=fields.get("return_token_ids", False),
            tokens_as_ids=fields.get("return_tokens_as_token_ids") or False,
        ),
        max_tokens=fields.get("max_tokens", LIMIT),
    )


def prefill_leg(endpoint: Endpoint, fields: Mapping[str, Any], script: Script) -> Any:
    """vLLM's own answer to the prefill leg of a request."""
    kept = {name: value for name, value in fields.items() if name not in ("stream", "stream_options", "stop")}
    leg = {**kept, "max_tokens": 1, "min_tokens": min(1, fields.get("min_tokens", 0))}
    if plan_of(endpoint, fields).sampling.logprobs is not None:
        leg["return_tokens_as_token_ids"] = True
    return vllm_whole(endpoint, leg, script, {"for": "the gateway"})


def whole_batch(script: Script, plan: Plan) -> Batch:
    """All tokens of an answer as the two legs make them: up to a stop id, or as many as are asked for."""
    model = card_of(script.tokenizer)
    stops = {*plan.sampling.stop_token_ids, *(() if plan.sampling.ignore_eos else model.stop_token_ids)}
    limit = plan.max_tokens or LIMIT
    count = next((index for index, token in enumerate(script.ids[:limit], 1) if token in stops), limit)
    ids = script.ids[:count]
    return Batch(ids, "stop" if ids[-1] in stops else "length", script.logprobs[:count])


def cut(batch: Batch, at: Iterable[int]) -> list[Batch]:
    """The same tokens in batches that end at these counts."""
    ends = sorted({end for end in at if 0 < end < len(batch.ids)})
    pieces = zip([0, *ends], [*ends, len(batch.ids)], strict=True)
    parts = [Batch(batch.ids[a:b], None, batch.logprobs[a:b]) for a, b in pieces]
    return [*parts[:-1], replace(parts[-1], finish=batch.finish)]


def one_by_one(batch: Batch) -> list[Batch]:
    """The same tokens in a batch each."""
    return cut(batch, range(len(batch.ids)))


@dataclass
class Lane:
    """The lane's end of one answer."""

    plan: Plan
    prefill: PrefillAnswer
    state: AnswerState


def lane_of(endpoint: Endpoint, fields: Mapping[str, Any], script: Script) -> Lane:
    """The lane with vLLM's answer to the prefill leg."""
    plan = plan_of(endpoint, fields)
    prefill = read_prefill_answer(endpoint, json.dumps(prefill_leg(endpoint, fields, script)).encode())
    return Lane(plan, prefill, AnswerState(card_of(script.tokenizer), plan, script.prompt[-PROMPT_TAIL:]))


def lane_stream(lane: Lane, batches: Sequence[Batch]) -> list[Any]:
    """The events of the lane's stream, parsed; [DONE] as it is."""
    writer = stream_writer(lane.plan, lane.prefill, lane.state)
    sent = writer.begin()
    for batch in batches:
        sent += writer.write(batch)
        if lane.state.finish_reason is not None:
            break
    return parsed(sent + writer.end())


def lane_whole(lane: Lane, batches: Sequence[Batch]) -> Any:
    """The lane's answer that does not stream, parsed."""
    writer = json_writer(lane.plan, lane.prefill, lane.state)
    for batch in batches:
        writer.add(batch)
        if lane.state.finish_reason is not None:
            break
    return json.loads(writer.end())
