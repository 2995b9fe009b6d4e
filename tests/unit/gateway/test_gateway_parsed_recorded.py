"""Parsed answers against exchanges recorded with vLLM 0.32: its render and derender endpoints, and its own answers.

SmolLM2 with the hermes tool parser; for the one with reasoning, with deepseek_r1's parser, too, and its tokens renamed.
"""

import json
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models

from gateway.answer import AnswerState, read_prefill_answer
from gateway.body import Body
from gateway.cards import Card
from gateway.endpoints import Endpoint
from gateway.parsed import ParsedStream, Parts, parsed_whole
from gateway.plan import Form, Plan, Sampling
from gateway.reasoning import reasoning_tokens
from gateway.rendering import RENDER_PATH, Derenderer, Rendered, make_parsing, render
from gateway.sse import EventReader
from gateway.tokens import Batch
from gateway.upstream import Credentials
from tests.kit.gateway import CREDENTIALS, card

RECORDED = json.loads((Path(__file__).parent / "parsed_exchanges.json").read_text())
EACH = pytest.mark.parametrize("case", RECORDED, ids=[case["name"] for case in RECORDED])

_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<{number}>" for number in range(3, 11)), "<15>", "<16>"]
_UNUSED = ["<11>", "<12>", "<13>", "<14>"]
_MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]


class Recording:
    """Answers as vLLM did, and holds every call against the recorded one."""

    def __init__(self, case: dict[str, Any], *, stream: bool) -> None:
        self.case = case
        self.calls: list[dict[str, Any]] = list(case["stream" if stream else "whole"])
        self._state: Any = {"role_sent": True}

    async def post(self, path: str, content: bytes, credentials: Credentials, timeout_s: float) -> tuple[int, bytes]:
        asked = json.loads(content)
        if path == RENDER_PATH:
            assert asked == self.case["request"]
            return 200, json.dumps(self.case["rendered"]).encode()
        recorded = self.calls.pop(0)
        assert (asked["chat_request"], asked["prompt_token_ids"]) == (
            self.case["request"],
            self.case["rendered"]["token_ids"],
        )
        assert asked["generate_chunk" if asked["stream"] else "generate_response"]["choices"] == [recorded["choice"]]
        if asked["stream"]:
            assert asked["stream_state"] == self._state
            self._state = recorded["answer"]["stream_state"]
        return 200, json.dumps(recorded["answer"]).encode()


def model_card(*, reasons: bool) -> Card:
    """SmolLM2's added tokens, at their ids; no other token has a text here."""
    plain = _MARKERS if reasons else []
    texts = [*_SPECIAL[:11], *(plain or _UNUSED), *_SPECIAL[11:]]
    tokenizer = Tokenizer(models.WordLevel({text: token for token, text in enumerate(texts)}))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in texts if text not in plain])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in plain])
    return replace(card(), tokenizer=tokenizer, stop_token_ids=(2,), eos_token_id=2)


async def parts_of(case: dict[str, Any], recording: Recording, *, stream: bool) -> Parts:
    """The parts of one answer, as the lane puts them together."""
    streaming = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    request = Body(json.dumps(case["request"] | streaming).encode())
    rendered = await render(recording.post, request, CREDENTIALS, 5)
    assert isinstance(rendered, Rendered)
    model = model_card(reasons=rendered.reasons)
    form = Form(stream=stream, include_usage=stream)
    plan = Plan(Endpoint.CHAT, "smollm2", Sampling(0.0), form, case["request"]["max_tokens"], rendered.grammar, parsed=True)
    parsing = make_parsing(request, plan, model, rendered)
    prefill = read_prefill_answer(Endpoint.CHAT, json.dumps(case["prefill"]).encode())
    return Parts(
        plan,
        prefill,
        AnswerState(model, plan, ()),
        parsing,
        Derenderer(recording.post, CREDENTIALS, 5, parsing),
        reasoning_tokens("deepseek_r1", model.tokenizer) if rendered.reasons else None,
    )


async def tokens_of(case: dict[str, Any]) -> AsyncIterator[Batch]:
    """The first token, and all others at once."""
    first, *rest = case["ids"]
    yield Batch((first,))
    yield Batch(tuple(rest), case["finish"])


@EACH
async def test_the_stream_says_what_vllms_own_says(case: dict[str, Any]) -> None:
    recording = Recording(case, stream=True)
    stream = ParsedStream(await parts_of(case, recording, stream=True))
    said = b"".join([chunk async for chunk in stream.chunks(tokens_of(case))])
    assert joined(said) == joined(case["vllm_stream"].encode())
    assert recording.calls == []
    assert stream.error is None


@EACH
async def test_the_whole_answer_is_vllms_own(case: dict[str, Any]) -> None:
    recording = Recording(case, stream=False)
    answer = await parsed_whole(await parts_of(case, recording, stream=False), tokens_of(case))
    assert undrawn(json.loads(answer)) == undrawn(case["vllm"])
    assert recording.calls == []


def joined(stream: bytes) -> dict[str, Any]:
    """A stream's chunks put together, without what is drawn anew for each answer."""
    *chunks, last = EventReader().feed(stream)
    parsed = [json.loads(chunk) for chunk in chunks]
    choices = [choice for chunk in parsed for choice in chunk["choices"]]
    deltas = [choice["delta"] for choice in choices]
    ended = [(c["finish_reason"], c["stop_reason"]) for c in choices if c["finish_reason"] is not None]
    return {
        **{name: "".join(delta.get(name) or "" for delta in deltas) for name in ("role", "content", "reasoning")},
        "calls": _joined_calls(call for delta in deltas for call in delta.get("tool_calls") or ()),
        "ended": ended,
        "usage": [chunk["usage"] for chunk in parsed if "usage" in chunk],
        "models": {(chunk["object"], chunk["model"]) for chunk in parsed},
        "fingerprint": parsed[-1].get("system_fingerprint"),
        "opening": choices[0],
        "last": last,
    }


def _joined_calls(deltas: Iterable[dict[str, Any]]) -> dict[int, dict[str, str]]:
    calls: dict[int, dict[str, str]] = {}
    for delta in deltas:
        call, function = calls.setdefault(delta["index"], {"arguments": ""}), delta["function"]
        call["arguments"] += function.get("arguments") or ""
        if function.get("name"):
            call |= {"name": function["name"], "id": _form(delta["id"]), "type": delta["type"]}
    return calls


def undrawn(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer that does not stream, without what is drawn anew for each one."""
    (choice,) = answer["choices"]
    calls = [call | {"id": _form(call["id"])} for call in choice["message"].get("tool_calls", ())]
    message = choice["message"] | ({"tool_calls": calls} if calls else {})
    return {**answer, "id": "", "created": 0, "choices": [{**choice, "message": message}]}


def _form(drawn: str) -> str:
    name, dash, number = drawn.rpartition("-")
    return name + dash + "0" * len(number)
