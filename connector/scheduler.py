"""The scheduler side: which requests carry a valid claim, which of their blocks are ready, and what prefill found.

Never matches tokens, never touches scheduling or sampling. Keyed on vLLM's request id here (its random suffix differs per
engine); everything that leaves the process is keyed on the claim's handoff id.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from connector.announcer import Announcer
from connector.metadata import Chunk, HandoffMetadata, Opening
from handoff.claim import CLAIM_KEY, Claim, ClaimError, ClaimKeys, SignedClaim, from_params
from handoff.messages import Abort, Final
from handoff.prompt import digest, packed

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(f"vllm.anchorleg.{__name__}")  # below vLLM's own logger, so that its settings hold

_WARN_EVERY_S = 10.0
PROMPT_TAIL = 32  # ids a gateway's detokenizer is primed with; no tokenizer looks further back


@dataclass(slots=True)
class Tracked:
    """A claimed request between its first scheduling and its end."""

    claim: SignedClaim
    prompt_tokens: int
    block_ids: list[int] = field(default_factory=list)
    sent_blocks: int = 0
    opened: bool = False  # the worker knows of it, so only the worker can say when its blocks are free
    given_up: bool = False


class SchedulerSide:
    """Owns the table of claimed requests."""

    def __init__(
        self, keys: ClaimKeys, block_tokens: int, announcer: Announcer, serving: Mapping[str, Any] | None = None
    ) -> None:
        """`serving`: how this vLLM is configured, told to the gateway with every first token."""
        self._keys = keys
        self._block_tokens = block_tokens
        self._announcer = announcer
        self._serving = dict(serving or {})
        self._tracked: dict[str, Tracked] = {}
        self._refused: set[str] = set()  # ids whose claim was looked at and found wanting
        self._used = UsedClaims()
        self._warn_again = 0.0
        self._withdrawn: list[str] = []
        self._held: set[str] = set()  # finished, their blocks not yet released by the worker

    def consider(self, request: "Request") -> None:
        """Start tracking a request if it carries a valid claim. Called whenever vLLM asks about it; idempotent."""
        params = request.kv_transfer_params
        if not params or request.request_id in self._tracked or request.request_id in self._refused:
            return
        try:
            signed = from_params(params)
            if signed is None:
                return
            self._used.take(self._keys.verify(signed))
        except ClaimError as error:
            # Nobody is told: the claim may be another pool's, and in order, or a copy of one whose handoff is under way.
            self._refused.add(request.request_id)
            self._warn("request %s: %s; it is served as an ordinary request", request.request_id, error)
            return
        self._announcer.connect(signed.claim)
        reason = _why_not_here(request)
        if reason is not None:
            self._refused.add(request.request_id)
            logger.warning("handoff %s: %s; it is served as an ordinary request", signed.claim.handoff_id, reason)
            self._announcer.send(signed.claim, Abort(signed, reason))
            return
        self._tracked[request.request_id] = Tracked(signed, request.num_prompt_tokens)

    def build(self, output: "SchedulerOutput") -> HandoffMetadata:
        """Return this step's openings and chunks, and what was withdrawn since the last step."""
        metadata = HandoffMetadata(withdrawn=self._withdrawn, computes=output.total_num_scheduled_tokens > 0)
        self._withdrawn = []
        if not self._tracked:
            return metadata
        cached = output.scheduled_cached_reqs
        for request_id in {*(output.preempted_req_ids or ()), *cached.resumed_req_ids}:
            self._give_up(request_id, metadata.preempted, "preempted")
        # vLLM 0.30 and 0.31 with HiSparse: other blocks than those that were told of before.
        for request_id in getattr(output, "block_table_updates", None) or ():
            self._give_up(request_id, metadata.withdrawn, "vLLM has moved its blocks")
        for new in output.scheduled_new_reqs:
            tracked = self._tracked.get(new.req_id)
            if tracked is not None and not tracked.given_up:
                if len(new.block_ids) != 1:
                    self._give_up(
                        new.req_id,
                        metadata.withdrawn,
                        f"{len(new.block_ids)} KV cache groups are not supported",
                    )
                    continue
                tracked.block_ids = list(new.block_ids[0])
                tracked.opened = True
                metadata.openings.append(Opening(new.req_id, tracked.claim, tracked.prompt_tokens))
                computed = new.num_computed_tokens + output.num_scheduled_tokens[new.req_id]
                self._add_chunk(new.req_id, tracked, computed, metadata)
        for index, request_id in enumerate(cached.req_ids):
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.opened and not tracked.given_up:
                new_blocks = cached.new_block_ids[index]
                if new_blocks is not None:
                    tracked.block_ids.extend(new_blocks[0])
                computed = cached.num_computed_tokens[index] + output.num_scheduled_tokens[request_id]
                self._add_chunk(request_id, tracked, computed, metadata)
        return metadata

    def finished(self, request: "Request") -> tuple[bool, dict[str, Any] | None]:
        """Tell the daemon how prefill ended; returns whether the blocks must be held, and what the gateway is told."""
        self._refused.discard(request.request_id)
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return False, None
        reason = _why_unusable(request, tracked, self._block_tokens)
        if reason is not None:
            if not tracked.given_up:
                self._announcer.send(tracked.claim.claim, Abort(tracked.claim, reason))
            if tracked.opened:
                self._withdrawn.append(request.request_id)
                self._held.add(request.request_id)
            return tracked.opened, None
        prompt = list(request.prompt_token_ids or ())
        whole = packed(prompt)
        first_token = int(request.output_token_ids[0])
        self._announcer.send(
            tracked.claim.claim,
            Final(
                claim=tracked.claim,
                prompt=whole,
                first_token=first_token,
                finished=request.status.name == "FINISHED_STOPPED",
            ),
        )
        self._held.add(request.request_id)
        told = {
            "first_token": first_token,
            "prompt_tail": prompt[-PROMPT_TAIL:],
            "prompt_digest": digest(whole),
            "serving": self._serving,
        }
        return True, {CLAIM_KEY: told}

    def released(self, request_ids: set[str]) -> None:
        """The worker has reported these: their blocks are free."""
        self._held -= request_ids

    def pending(self) -> bool:
        """Whether vLLM must keep stepping: the worker is to be told something, or to be asked for held blocks."""
        return bool(self._withdrawn or self._held)

    def _warn(self, message: str, *values: object) -> None:
        """Log what clients, and the other pool's requests, can cause as often as they like."""
        now = time.monotonic()
        if now < self._warn_again:
            logger.debug(message, *values)
        else:
            self._warn_again = now + _WARN_EVERY_S
            logger.warning(message, *values)

    def _add_chunk(self, request_id: str, tracked: Tracked, computed: int, metadata: HandoffMetadata) -> None:
        last = computed >= tracked.prompt_tokens
        blocks = -(-tracked.prompt_tokens // self._block_tokens) if last else computed // self._block_tokens
        if blocks <= tracked.sent_blocks:
            return
        ids = tracked.block_ids[tracked.sent_blocks : blocks]
        if len(ids) != blocks - tracked.sent_blocks:
            self._give_up(
                request_id,
                metadata.withdrawn,
                f"{len(ids)} blocks where {blocks - tracked.sent_blocks} are due",
            )
            return
        metadata.chunks.append(Chunk(request_id, tracked.sent_blocks, tuple(ids), last))
        tracked.sent_blocks = blocks

    def _give_up(self, request_id: str, told: list[str], reason: str) -> None:
        """The request goes on as an ordinary one; its daemon is told at once."""
        tracked = self._tracked.get(request_id)
        if tracked is None or tracked.given_up:
            return
        tracked.given_up = True
        logger.warning("handoff %s: given up, %s", tracked.claim.claim.handoff_id, reason)
        self._announcer.send(tracked.claim.claim, Abort(tracked.claim, reason))
        if tracked.opened:
            told.append(request_id)


class UsedClaims:
    """Claims that requests have been tracked for: each permits one handoff. Kept until they expire."""

    def __init__(self) -> None:
        self._expiries: dict[str, int] = {}  # by handoff id, oldest first

    def __len__(self) -> int:
        return len(self._expiries)

    def take(self, claim: Claim, *, now: float | None = None) -> None:
        """Raise ClaimError if the claim has been taken before."""
        now = time.time() if now is None else now
        while self._expiries and (first := next(iter(self._expiries.items())))[1] < now:
            del self._expiries[first[0]]
        if claim.handoff_id in self._expiries:
            raise ClaimError(f"the claim of epoch {claim.epoch} of slot {claim.slot} has been used by an earlier request")
        self._expiries[claim.handoff_id] = claim.expires


def _why_not_here(request: "Request") -> str | None:
    """Say why a request's KV is not that of the daemon's model for its token ids; None if it is."""
    if request.lora_request is not None:
        return "computed with a LoRA adapter"
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return "computed from embeddings"
    return None


def _why_unusable(request: "Request", tracked: Tracked, block_tokens: int) -> str | None:
    """Say why a finished prefill cannot be decoded elsewhere; None if it can."""
    if tracked.given_up:
        return "given up"
    status = str(request.status.name)
    if status not in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"):
        return status.removeprefix("FINISHED_").lower()
    if not request.output_token_ids:
        return "no first token"
    if tracked.sent_blocks != -(-tracked.prompt_tokens // block_tokens):
        return f"{tracked.sent_blocks} blocks were sent of a prompt of {tracked.prompt_tokens} tokens"
    return None
