"""Requests and the plans that the gateway makes of them."""

import json
import warnings
from functools import cache
from types import SimpleNamespace
from typing import Any

from gateway.body import Body
from gateway.cards import Card
from gateway.eligibility import Unsupported, why_not
from gateway.endpoints import Endpoint
from gateway.plan import Plan, make_plan
from tests.kit.fields import CHAT, request
from tests.kit.gateway import bpe_tokenizer, card

VOCAB = bpe_tokenizer().get_vocab_size()


@cache
def the_card() -> Card:
    return card()


def plan_of(fields: dict[str, Any], endpoint: Endpoint = CHAT, **options: Any) -> Plan:
    plan = outcome(fields, endpoint, **options)
    assert isinstance(plan, Plan), plan
    return plan


def outcome(
    fields: dict[str, Any],
    endpoint: Endpoint = CHAT,
    *,
    model: Card | None = None,
    tools: bool = False,
    reasoning: bool = False,
) -> Plan | Unsupported:
    body = Body(json.dumps(request(endpoint, **fields)).encode())
    assert why_not(endpoint, body, tools=tools, reasoning=reasoning) is None
    return make_plan(endpoint, body, model or the_card(), tools=tools, reasoning=reasoning)


def look_at_limit(theirs: Any) -> None:
    """What vLLM does before it tokenizes; raises where the limit that is asked for is none in the card's context."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs.build_tok_params(SimpleNamespace(max_model_len=the_card().context_tokens))
