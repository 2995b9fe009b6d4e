"""Parsed streams against vLLM's own parsers, one token at a time as its engine feeds them: no cut changes the message."""

import json
import random
import warnings
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from gateway.answer import AnswerState, read_prefill_answer
from gateway.endpoints import Endpoint
from gateway.parsed import ParsedStream, Parts
from gateway.plan import Form, Plan, Sampling
from gateway.reasoning import reasoning_tokens
from gateway.rendering import Derenderer, Rendered, make_parsing
from gateway.sse import EventReader
from gateway.tokens import Batch
from gateway.upstream import Credentials
from tests.kit.gateway import CREDENTIALS, MODEL, PROMPT, body, bpe_tokenizer, card, chat, end_id, prefill_answer

END = end_id()
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("get_weather", "get_time")
]
_MARKERS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[THINK]",
    "[/THINK]",
]
_WEATHER = json.dumps({"city": 'Paris, "日本" 🙂', "days": 3}, ensure_ascii=False)
_HERMES = f'<tool_call>\n{{"name": "get_weather", "arguments": {_WEATHER}}}\n</tool_call>'
_HERMES_TIME = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
_LLAMA = f'{{"name": "get_weather", "parameters": {_WEATHER}}}'

ANSWERS: list[tuple[str, str, str]] = [
    ("hermes", "", f"I ask. {_HERMES}\n{_HERMES_TIME}"),
    ("hermes", "", _HERMES[:-30]),
    ("hermes", "", "no call, <tool only, 🙂"),
    ("llama3_json", "", _LLAMA),
    ("llama3_json", "", f'<|python_tag|>{_LLAMA}; {{"name": "get_time", "parameters": {{"zone": "CET"}}}}'),
    ("pythonic", "", "[get_weather(city='Paris', days=3), get_time(zone='CET')]"),
    ("mistral", "", f"Hi [TOOL_CALLS]get_weather[ARGS]{_WEATHER}[TOOL_CALLS]get_time[ARGS]{{}}"),
    ("hermes", "deepseek_r1", f"<think>They ask 🙂 much.</think>\n\nI ask.{_HERMES}"),
    ("hermes", "deepseek_r1", "thoughts without a beginning</think>answer"),
    ("hermes", "deepseek_r1", "<think>thoughts without an end"),
    ("hermes", "deepseek_r1", "<think>one</think>two<think>three</think>"),
    ("hermes", "qwen3", f"<think>They ask.</think>\n\nI ask.{_HERMES}"),
    ("mistral", "mistral", f"[THINK]They ask.[/THINK]Hi [TOOL_CALLS]get_weather[ARGS]{_WEATHER}"),
]


@cache
def tokenizer() -> Tokenizer:
    """The byte-level BPE of the gateway's tests, with the markers of these parsers as added tokens."""
    copy = Tokenizer.from_str(bpe_tokenizer().to_str())
    copy.add_tokens([AddedToken(text, special=False) for text in _MARKERS])
    return copy


@cache
def vllm() -> SimpleNamespace:
    """What parses answers there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import PreTrainedTokenizerFast
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.scale_out.token_in_token_out.protocol import DerenderChatStreamRequest
        from vllm.parser import ParserManager
        from vllm.reasoning import ReasoningParserManager
        from vllm.renderers.online_derenderer import OnlineDerenderer
    return SimpleNamespace(
        Request=ChatCompletionRequest,
        Asked=DerenderChatStreamRequest,
        Derenderer=OnlineDerenderer,
        parser=ParserManager.get_parser,
        reasoner=ReasoningParserManager.get_reasoning_parser,
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=tokenizer()),
    )


@dataclass(frozen=True)
class Parsers:
    """One configuration of vLLM's parsers."""

    tools: str
    reasoning: str

    @property
    def cls(self) -> Any:
        return vllm().parser(
            tool_parser_name=self.tools,
            reasoning_parser_name=self.reasoning,
            enable_auto_tools=True,
            tokenizer=vllm().tokenizer,
        )

    def plain(self, ids: Sequence[int], finish: str) -> dict[str, Any]:
        """What vLLM streams: a call of the parser for each token, the last one with the finish."""
        parser = self.cls(
            vllm().tokenizer, vllm().Request(**chat(tools=TOOLS)).tools, chat_template_kwargs={}, model_config=None
        )
        request = vllm().Request(**chat(tools=TOOLS, tool_choice="auto"))
        texts = _texts(ids)
        steps = [*((text, [token], finish == "length" and n == len(ids)) for n, (token, text) in enumerate(texts, 1))]
        steps += [("", [END], True)] if finish == "stop" else []
        deltas = [parser.parse_delta(text, new, request, list(PROMPT), finished=last) for text, new, last in steps]
        return joined([delta.model_dump() for delta in deltas if delta is not None])

    async def post(self, path: str, content: bytes, credentials: Credentials, timeout_s: float) -> tuple[int, bytes]:
        """Answer as its derender endpoint does."""
        asked = vllm().Asked.model_validate_json(content)
        endpoint = object.__new__(vllm().Derenderer)
        vars(endpoint).update(
            renderer=SimpleNamespace(get_tokenizer=lambda: vllm().tokenizer),
            model_config=None,
            use_harmony=False,
            chat_template=None,
            chat_template_content_format="auto",
            default_chat_template_kwargs={},
        )
        chunk, state = endpoint._derender_chat_stream_parsed(
            self.cls, MODEL, asked.generate_chunk, asked.stream_state, asked.chat_request, None, asked.prompt_token_ids
        )
        return 200, json.dumps({"chunk": chunk.model_dump(), "stream_state": state.model_dump()}).encode()


def _texts(ids: Sequence[int]) -> list[tuple[int, str]]:
    """Each token with what it adds to the text: nothing while a character is unfinished."""
    texts, shown = [], ""
    for count, token in enumerate(ids, 1):
        text = tokenizer().decode(list(ids[:count]), skip_special_tokens=False)
        new = "" if text.endswith("�") else text[len(shown) :]
        shown += new
        texts.append((token, new))
    return texts


def joined(deltas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Deltas put together."""
    calls: dict[int, dict[str, str]] = {}
    for call in (call for delta in deltas for call in delta.get("tool_calls") or ()):
        function, so_far = call["function"], calls.setdefault(call["index"], {"name": "", "arguments": ""})
        so_far["name"] += function.get("name") or ""
        so_far["arguments"] += function.get("arguments") or ""
    return {name: "".join(delta.get(name) or "" for delta in deltas) for name in ("content", "reasoning")} | {"calls": calls}


async def lane(parsers: Parsers, batches: Sequence[Batch]) -> dict[str, Any]:
    """What the lane streams of these tokens."""
    model = replace(card(), tokenizer=tokenizer())
    plan = Plan(Endpoint.CHAT, MODEL, Sampling(0.0), Form(stream=True), 999, parsed=True)
    rendered = Rendered(PROMPT, None, (), skip_special_tokens=False, reasons=bool(parsers.reasoning))
    parsing = make_parsing(body(tools=TOOLS, tool_choice="auto"), plan, model, rendered)
    prefill = read_prefill_answer(Endpoint.CHAT, json.dumps(prefill_answer(batches[0].ids[0])).encode())
    parts = Parts(plan, prefill, AnswerState(model, plan, ()), parsing, Derenderer(parsers.post, CREDENTIALS, 5, parsing))

    async def tokens() -> AsyncIterator[Batch]:
        for batch in batches:
            yield batch

    said = b"".join([chunk async for chunk in ParsedStream(parts).chunks(tokens())])
    *chunks, last = EventReader().feed(said)
    assert last == b"[DONE]"
    return joined([json.loads(chunk)["choices"][0]["delta"] for chunk in chunks])


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize(("tools", "reasoning", "text"), ANSWERS)
async def test_no_cut_of_the_tokens_changes_the_message(tools: str, reasoning: str, text: str, finish: str) -> None:
    parsers = Parsers(tools, reasoning)
    ids = tuple(tokenizer().encode(text, add_special_tokens=False).ids)
    expected = parsers.plain(ids, finish)
    whole = (*ids, END) if finish == "stop" else ids
    draw = random.Random(f"{tools} {reasoning} {text}")
    for ends in ([], range(1, len(whole)), sorted(draw.sample(range(1, len(whole)), len(whole) // 5))):
        cuts = zip([0, *ends], [*ends, len(whole)], strict=True)
        batches = [Batch(whole[start:end], finish if end == len(whole) else None) for start, end in cuts]
        assert await lane(parsers, batches) == expected


@pytest.mark.parametrize("name", ["deepseek_r1", "ernie45", "granite", "hunyuan_a13b", "minimax_m2_append_think", "olmo3"])
def test_tokens_of_reasoning_are_as_many_as_vllm_counts(name: str) -> None:
    theirs = object.__new__(vllm().reasoner(name))
    ours = reasoning_tokens(name, tokenizer())
    assert ours is not None
    start, end = (tokenizer().token_to_id(text) for text in ("<think>", "</think>"))
    vars(theirs).update(start_token_id=start, end_token_id=end)
    draw = random.Random(name)
    ids = draw.choices([start, end, *range(9)], k=200)
    assert [ours.add([token]) for token in ids] == [theirs.count_reasoning_tokens(ids[:count]) for count in range(1, 201)]


def test_a_parser_that_counts_in_its_own_way_is_left_to_vllm() -> None:
    assert reasoning_tokens("qwen3", tokenizer()) is None
    assert reasoning_tokens("unheard_of", tokenizer()) is None
