"""vLLM's scale-out endpoints: a chat request to a prompt and a grammar, and tokens back to the message that its parsers make.

An answer with tool calls or reasoning is parsed by vLLM itself, so that it is vLLM's own. vLLM is stateless here: what it knows
of a streamed answer travels to and fro with each call, and it parses the answer from its beginning each time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
import structlog

from gateway.body import Body
from gateway.cards import Card
from gateway.eligibility import Unsupported, unsupported
from gateway.grammars import Grammar, admits_structured_outputs, grammar_of
from gateway.plan import Plan
from gateway.tokens import TokenId
from gateway.upstream import Credentials, UpstreamUnavailable

log = structlog.get_logger(__name__)

RENDER_PATH = "/v1/chat/completions/render"
DERENDER_PATH = "/v1/chat/completions/derender"

_NOT_RENDERED = frozenset({"stream", "stream_options", "kv_transfer_params"})
_UNAVAILABLE = "derender_unavailable"

_T = TypeVar("_T")


class Post(Protocol):
    """Sends JSON to vLLM with a client's credentials; returns status and body, or raises UpstreamUnavailable."""

    async def __call__(  # noqa: D102 - the class says it
        self, path: str, content: bytes, credentials: Credentials, timeout_s: float
    ) -> tuple[int, bytes]: ...


class ToolChoice(StrEnum):
    """What a request's tool_choice comes to."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class Rendered:
    """What vLLM makes of a chat request before it generates, its parsers' wishes included."""

    prompt: tuple[int, ...]
    grammar: Grammar | None  # the request's own, or the tools'
    stop_token_ids: tuple[int, ...]  # the client's and any that a parser adds: both legs stop there
    skip_special_tokens: bool  # parsers that look for special tokens turn it off
    reasons: bool  # vLLM has a reasoning parser


@dataclass(frozen=True, slots=True)
class Parsing:
    """What vLLM's parsers need to know of one request, and what of theirs the client sees."""

    chat: bytes  # the request, in the client's own bytes
    model: str
    prompt: tuple[int, ...]
    choice: ToolChoice
    one_call: bool  # parallel_tool_calls is false
    hidden: bool  # include_reasoning is false: ids and logprobs would tell the reasoning
    unseen: frozenset[int]  # ids whose text vLLM leaves out before it parses
    markers: frozenset[int]  # added tokens, which parsers may look for by id


def make_parsing(body: Body, plan: Plan, card: Card, rendered: Rendered) -> Parsing:
    """Put together what the parsers of this request's answer need."""
    added = card.tokenizer.get_added_tokens_decoder()
    special = frozenset(token for token, text in added.items() if text.special)
    return Parsing(
        chat=chat_request(body),
        model=plan.model,
        prompt=rendered.prompt,
        choice=tool_choice(body),
        one_call=body.get("parallel_tool_calls") is False,
        hidden=body.get("include_reasoning") is False,
        unseen=special if rendered.skip_special_tokens else frozenset(),
        markers=frozenset(added),
    )


def chat_request(body: Body) -> bytes:
    """Return the chat request that is rendered and parsed: the client's own bytes, without what only concerns its transport."""
    return body.with_members([key for key, _ in body.items() if key not in _NOT_RENDERED], {})


def tool_choice(body: Body) -> ToolChoice:
    """Return the request's tool_choice; expects a body that `eligibility.why_not` has nothing against."""
    value = body.get("tool_choice")
    if value is None:
        return ToolChoice.AUTO if body.get("tools") else ToolChoice.NONE
    return ToolChoice.NAMED if isinstance(value, dict) else ToolChoice(value)


# --- rendering ---


class _SamplingParams(msgspec.Struct):
    """vLLM leaves out what is at its default."""

    stop: list[str] = []
    stop_token_ids: list[TokenId] = []
    skip_special_tokens: bool = True
    structured_outputs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None


class _GenerateRequest(msgspec.Struct):
    token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)]
    sampling_params: _SamplingParams
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    features: Any = None


async def render(post: Post, body: Body, credentials: Credentials, timeout_s: float) -> Rendered | Unsupported:
    """Let vLLM render a chat request.

    Unsupported where vLLM refuses it, does not serve the endpoint, or asks for what the lane cannot do; raises
    UpstreamUnavailable.
    """
    status, content = await post(RENDER_PATH, chat_request(body), credentials, timeout_s)
    if _not_served(status, content):
        log.warning("vLLM does not render: start it with --enable-scale-out", path=RENDER_PATH, status=status)
        return Unsupported(_UNAVAILABLE, f"vLLM does not serve {RENDER_PATH}: start it with --enable-scale-out")
    if 400 <= status < 500:
        return Unsupported("refused_by_vllm", "vLLM refuses this request")
    if status != 200:
        raise UpstreamUnavailable(f"vLLM's {RENDER_PATH} answered {status}")
    try:
        return _rendered(msgspec.json.decode(content, type=_GenerateRequest))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UpstreamUnavailable(f"vLLM's {RENDER_PATH}: {error!r}") from error


def _not_served(status: int, content: bytes) -> bool:
    # vLLM 0.32 answers 403 and names the flag; one that does not know the path, 404 without an error object.
    return (status == 403 and b"--enable-scale-out" in content) or (status == 404 and b'"error"' not in content)


def _rendered(request: _GenerateRequest) -> Rendered | Unsupported:
    sampling, reasons = request.sampling_params, request.reasoning_parser_kwargs is not None
    if sampling.stop:
        # vLLM cuts the text before it parses it; only tokens can be sent to be parsed.
        return unsupported("stop", "stop strings in an answer that vLLM's parsers take apart")
    if sampling.thinking_token_budget is not None:
        return unsupported("thinking_token_budget", "a budget of tokens for reasoning")
    if request.features is not None:
        return unsupported("messages", "a prompt that is not text alone")
    grammar = None
    if sampling.structured_outputs is not None:
        # vLLM's notes to itself begin with an underscore.
        constraint = {key: value for key, value in sampling.structured_outputs.items() if not key.startswith("_")}
        if not admits_structured_outputs(constraint):
            return unsupported("structured_outputs", "vLLM constrains this answer in a way the latency lane does not know")
        if reasons and not request.reasoning_ended:
            return unsupported("structured_outputs", "a grammar that begins where the reasoning ends: vLLM alone knows where")
        grammar = grammar_of(None, constraint)
        grammar = None if grammar is None else replace(grammar, param="tools")
    return Rendered(
        prompt=tuple(request.token_ids),
        grammar=grammar,
        stop_token_ids=tuple(sampling.stop_token_ids),
        skip_special_tokens=sampling.skip_special_tokens,
        reasons=reasons,
    )


# --- and back ---


class _Message(msgspec.Struct):
    message: dict[str, Any]


class _Whole(msgspec.Struct):
    choices: Annotated[list[_Message], msgspec.Meta(min_length=1, max_length=1)]


class _Delta(msgspec.Struct):
    delta: dict[str, Any]


class _Chunk(msgspec.Struct):
    choices: Annotated[list[_Delta], msgspec.Meta(min_length=1, max_length=1)]


class _Streamed(msgspec.Struct):
    chunk: _Chunk
    stream_state: msgspec.Raw


_FRESH = msgspec.Raw(b'{"role_sent":true}')  # the role's chunk is the gateway's own


class Derenderer:
    """vLLM's parsers, for one answer. Calls must follow one another: each carries on from the one before."""

    def __init__(self, post: Post, credentials: Credentials, timeout_s: float, parsing: Parsing) -> None:
        self._post = post
        self._credentials = credentials
        self._timeout_s = timeout_s
        self._state = _FRESH
        prompt = msgspec.Raw(msgspec.json.encode(parsing.prompt))
        self._common = {"model": parsing.model, "chat_request": msgspec.Raw(parsing.chat), "prompt_token_ids": prompt}

    async def delta(self, ids: Sequence[int], finish: str | None) -> dict[str, Any]:
        """Return what these tokens add to the message, without nulls; no ids only with a finish. Raises UpstreamUnavailable."""
        chunk = {"choices": [_choice(ids, finish)]}
        request = {**self._common, "stream": True, "generate_chunk": chunk, "stream_state": self._state}
        answer = await self._call(request, _Streamed)
        self._state = answer.stream_state
        return _without_nulls(answer.chunk.choices[0].delta)

    async def message(self, ids: Sequence[int], finish: str) -> dict[str, Any]:
        """Return the message that all of an answer's tokens make; at least one. Raises UpstreamUnavailable."""
        response = {"prompt_token_ids": self._common["prompt_token_ids"], "choices": [_choice(ids, finish)]}
        answer = await self._call({**self._common, "stream": False, "generate_response": response}, _Whole)
        return answer.choices[0].message

    async def _call(self, request: dict[str, Any], kind: type[_T]) -> _T:
        content = msgspec.json.encode(request)
        try:
            status, body = await self._post(DERENDER_PATH, content, self._credentials, self._timeout_s)
        except UpstreamUnavailable as error:
            # Nothing is kept there between calls, so one that was lost is made again: another vLLM may answer it.
            log.warning("derender call lost; made again", error=str(error))
            status, body = await self._post(DERENDER_PATH, content, self._credentials, self._timeout_s)
        if status != 200:
            raise UpstreamUnavailable(f"vLLM's {DERENDER_PATH} answered {status}: {body[:200]!r}")
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise UpstreamUnavailable(f"vLLM's {DERENDER_PATH}: {error!r}") from error


def _choice(ids: Sequence[int], finish: str | None) -> dict[str, Any]:
    return {"index": 0, "token_ids": ids, "finish_reason": finish}


def _without_nulls(value: dict[str, Any]) -> dict[str, Any]:
    """Return a delta as vLLM streams it; its derender endpoint fills in what a parser left open."""
    return {key: _without_null(member) for key, member in value.items() if member is not None and member != []}


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return _without_nulls(value)
    return [_without_null(member) for member in value] if isinstance(value, list) else value
