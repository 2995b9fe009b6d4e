"""One chat answer of a scripted vLLM, in tokens, and what the lane's writers have to go by."""

import json
from typing import Any

from gateway.endpoints import Endpoint
from gateway.reply import AnswerState, read_prefill_answer
from gateway.tokens import TokenLogprobs
from tests.kit.gateway import ids_of
from tests.kit.lane_replies import Lane, plan_of
from tests.kit.scripts import Script, byte_tokenizer, card_of, id_of
from tests.kit.vllm_replies import untimed

TEXT = 'He said "née\n🙂", and left.\u2028\\'
IDS = tuple(ids_of(TEXT))
END, TURN = id_of(byte_tokenizer(), "<end>"), id_of(byte_tokenizer(), "<turn>")
OTHERS = tuple(zip(ids_of("@#"), (-(2.0**-15), -0.125), strict=True))
LOGPROBS = tuple(TokenLogprobs(-0.25 * index, OTHERS) for index in range(len(IDS) + 1))


def script(ending: int | None = END, **over: Any) -> Script:
    """The text, and how a model ends it; None: it would go on."""
    ids = IDS if ending is None else (*IDS, ending)
    return Script(**{"ids": ids, "logprobs": LOGPROBS[: len(ids)], **over})


def fields_of(told: Script, **fields: Any) -> dict[str, Any]:
    return {"max_tokens": len(told.ids), **fields}


def lane_from(leg: Any, **fields: Any) -> Lane:
    """The lane with an answer to the prefill leg that need not be vLLM's."""
    plan = plan_of(Endpoint.CHAT, fields)
    prefill = read_prefill_answer(Endpoint.CHAT, json.dumps(leg).encode())
    return Lane(plan, prefill, AnswerState(card_of(byte_tokenizer()), plan, script().prompt))


def script_for(told: Script, fields: dict[str, Any]) -> Script:
    """With as many alternatives as the fields ask for."""
    count = fields.get("top_logprobs", 0)
    logprobs = tuple(TokenLogprobs(each.logprob, each.top[:count]) for each in told.logprobs)
    return Script(told.ids, logprobs, fingerprint=told.fingerprint)


def listed(value: Any) -> str:
    """As JSON: nulls, order and all."""
    return json.dumps(untimed(value), indent=1)
