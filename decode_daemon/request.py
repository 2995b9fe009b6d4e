"""What a decode request asks of the engine.

Requests come from outside: what would cost memory or time without bound is refused here. The ranges of the values are the
engine's to check (engine/limits.py).
"""

from decode_daemon.engine.protocol import Constraint, DecodeParams, SamplingParams
from decode_daemon.grammar import GrammarUnsupported
from decode_daemon.slots import Landed
from handoff import decode_pb2 as pb

_MOST_LOGPROBS = 100  # alternatives for a token; vLLM's own default limit is 20
_MOST_IDS = 1 << 19  # in all fields together: every id of the largest vocabularies, twice
_LARGEST_GRAMMAR = 1 << 20  # bytes


class BadRequest(Exception):  # noqa: N818 - a refusal, not a fault
    """No engine could serve this: `code` is stable, the message names the field and its limit."""

    code = "bad_request"


def check_request(request: pb.DecodeRequest) -> None:
    """Raise BadRequest or GrammarUnsupported for what is too large, before anything is made of it."""
    if request.logprobs > _MOST_LOGPROBS:
        raise BadRequest(f"logprobs is {request.logprobs}; at most {_MOST_LOGPROBS} alternatives are told for a token")
    if (size := request.grammar.ByteSize()) > _LARGEST_GRAMMAR:
        raise GrammarUnsupported(f"the grammar has {size} bytes; at most {_LARGEST_GRAMMAR} are taken")
    ids = sum(
        map(len, (request.stop_token_ids, request.ending_token_ids, request.allowed_token_ids, request.logit_bias))
    ) + sum(len(sequence.ids) for sequence in request.bad_words)
    if ids > _MOST_IDS:
        raise BadRequest(f"the request names {ids} token ids; at most {_MOST_IDS} are taken")


def sampling_params(request: pb.DecodeRequest) -> SamplingParams:
    """Return how the request wants its tokens chosen."""
    return SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        seed=request.seed if request.HasField("seed") else None,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty if request.HasField("repetition_penalty") else 1.0,
        logit_bias=dict(request.logit_bias),
        allowed_token_ids=tuple(request.allowed_token_ids),
        bad_words=tuple(tuple(sequence.ids) for sequence in request.bad_words),
        min_tokens=request.min_tokens,
        ending_token_ids=frozenset(request.ending_token_ids),
        logprobs=request.logprobs if request.HasField("logprobs") else None,
    )


def decode_params(
    request: pb.DecodeRequest, landed: Landed, context_tokens: int, constraint: Constraint | None
) -> DecodeParams:
    """Return what to decode after the prompt that has landed. Raises BadRequest for an answer that is longer than it."""
    room = context_tokens - len(landed.prompt)
    if request.answered > len(landed.prompt):
        raise BadRequest(f"answered is {request.answered}; the prompt that landed has {len(landed.prompt)} ids")
    return DecodeParams(
        sampling=sampling_params(request),
        max_tokens=min(request.max_tokens or room, room),
        stop_token_ids=frozenset(request.stop_token_ids),
        constraint=constraint,
        answered=request.answered,
        speculate=request.speculation != pb.DecodeRequest.OFF,
    )
