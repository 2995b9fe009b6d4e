"""The gap from token 1 to token 2 on a real vLLM and a real daemon, over what cannot be saved: a raw write and the conversion.

What asks here does what a gateway does: it leases a slot, signs the claim, opens the daemon's stream and sends the prefill.
"""

import asyncio
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.handoff_landing import Landing, Plan, landing
from benchmarks.handoff_stack import Prompts, Stack
from benchmarks.handoff_wire import LAYOUT, RawWriter, expectation, raw_writer
from benchmarks.report import Measure
from gateway.decode_client import DecodeClient, DecodeFailed, DecodeStream
from handoff import decode_pb2 as pb
from handoff.claim import Claim, ClaimKeys, SignedClaim, new_handoff_id, to_bytes
from handoff.transports import TransportName
from leases import Grant, LeasesUnavailable, LeaseTable, SlotRequest
from process.errors import ProcessError

PROMPT_TOKENS = 1_000  # one chunk of vLLM's, and so the last one: eight blocks of SmolLM2's
_ANSWER_TOKENS = 24
_WARM_REQUESTS = 3
_SLOT_WAIT_MS = 30_000
_LEASE_MS = 10_000
_EVENT_TIMEOUT_S = 60.0
_CLAIM_LIFE_S = 600


@dataclass(frozen=True, slots=True)
class Gap:
    """One request, in seconds."""

    gap: float  # from vLLM's answer to the daemon's first token, both as the asker had them
    landed: float  # from vLLM's answer to the daemon's word that the KV cache is whole; below 0 where that came first
    step: float  # between two of the daemon's further tokens, the median
    convert: float
    raw: float  # a raw write of as many bytes, by the same transport

    @property
    def over_least(self) -> float:
        """The gap without the step that any token takes, over what the handoff cannot do without."""
        return (self.gap - self.step) / (self.raw + self.convert)


async def measure(stack: Stack, transport: TransportName, *, requests: int) -> list[Measure]:
    """Take the measures.

    Raises ProcessError, with what to look at, when a request is not served as it should be.
    """
    plan = Plan(transport, b"raw writes need no claim", expectation(PROMPT_TOKENS), 1, LAYOUT.bytes_for(PROMPT_TOKENS))
    async with AsyncExitStack() as opened:
        far = await opened.enter_async_context(landing(plan))
        raw = opened.enter_context(raw_writer(far))
        table = await opened.enter_async_context(LeaseTable(f"redis://127.0.0.1:{stack.ports.redis}/0"))
        client = await opened.enter_async_context(DecodeClient())
        asker = _Asker(stack, table, client, far, raw)
        try:
            await asker.meet()
            gaps = [await asker.ask() for _ in range(_WARM_REQUESTS + requests)]
        except (DecodeFailed, LeasesUnavailable) as error:
            raise ProcessError(f"{error}: see {stack.settings.logs}") from error
    return told(gaps[_WARM_REQUESTS:])


def told(gaps: Sequence[Gap]) -> list[Measure]:
    """Return what the requests say."""

    def median_ms(name: str) -> float:
        seconds: list[float] = [getattr(gap, name) for gap in gaps]
        return 1e3 * statistics.median(seconds)

    ratio = statistics.median(gap.over_least for gap in gaps)
    how = f"less a decode step of {median_ms('step'):.1f} ms, over a raw write of {median_ms('raw'):.1f} ms and the conversion"
    return [
        Measure("gap_ms", median_ms("gap"), "ms", f"from token 1 to token 2 of {PROMPT_TOKENS} prompt tokens"),
        Measure("gap_landed_ms", median_ms("landed"), "ms", "from token 1 to the daemon's word that the KV cache is whole"),
        Measure("gap_convert_ms", median_ms("convert"), "ms", "converting it into the engine's layout"),
        Measure("gap_over_least", ratio, "x", how),
    ]


class _Asker:
    """One client of the lane, asking one request after another."""

    def __init__(self, stack: Stack, table: LeaseTable, client: DecodeClient, far: Landing, raw: RawWriter) -> None:
        self._stack = stack
        self._table = table
        self._client = client
        self._far = far
        self._raw = raw
        self._keys = ClaimKeys(stack.settings.signing_keys)
        self._prompts = Prompts(seed=2)
        self._card = ""

    async def meet(self) -> None:
        """Learn the daemon's card, which every lease names."""
        endpoint = f"127.0.0.1:{self._stack.ports.decode[0]}"
        self._card = (await self._client.describe(endpoint, _EVENT_TIMEOUT_S)).fingerprint

    async def ask(self) -> Gap:
        """Have one answer made by both legs, and write as many bytes raw right after it."""
        prompt = self._prompts.next(PROMPT_TOKENS)
        converted = await self._stack.daemon_total("anchorleg_convert_seconds_sum")
        grant = await self._table.acquire(
            SlotRequest(
                pool=self._stack.settings.served_model_name,
                card=self._card,
                tokens=PROMPT_TOKENS + _ANSWER_TOKENS,
                lease_ms=_LEASE_MS,
                wait_ms=_SLOT_WAIT_MS,
            )
        )
        if not isinstance(grant, Grant):
            raise ProcessError(
                f"the daemon gave no slot within {_SLOT_WAIT_MS / 1e3:g} s ({grant}): see {self._stack.settings.logs}"
            )
        claim = self._claim(grant)
        stream = await self._client.reserve(grant.decode_endpoint, _request(claim), _EVENT_TIMEOUT_S)
        try:
            reading = asyncio.create_task(_read(stream))
            try:
                first_ns = await self._stack.prefill(prompt, claim=claim)
                landed_ns, token_ns = await reading
            finally:
                reading.cancel()
        finally:
            stream.cancel()
        steps = [after - before for before, after in pairwise(token_ns)]
        return Gap(
            gap=(token_ns[0] - first_ns) / 1e9,
            landed=(landed_ns - first_ns) / 1e9,
            step=statistics.median(steps) / 1e9,
            convert=await self._stack.daemon_total("anchorleg_convert_seconds_sum") - converted,
            raw=self._raw_write(),
        )

    def _raw_write(self) -> float:
        with self._far.attended():
            return self._raw.write(range(LAYOUT.blocks_for(PROMPT_TOKENS)))

    def _claim(self, grant: Grant) -> SignedClaim:
        expires = int(time.time()) + _CLAIM_LIFE_S
        claim = Claim(new_handoff_id(), grant.control_host, grant.control_port, grant.slot, grant.epoch, expires)
        return self._keys.sign(claim)


def _request(claim: SignedClaim) -> pb.DecodeRequest:
    return pb.DecodeRequest(
        handoff_id=claim.claim.handoff_id,
        slot=claim.claim.slot,
        epoch=claim.claim.epoch,
        claim=to_bytes(claim),
        max_tokens=_ANSWER_TOKENS,
        temperature=0.0,
        top_p=1.0,
    )


async def _read(stream: DecodeStream) -> tuple[int, list[int]]:
    """Return when the KV cache had landed, and when each of the daemon's steps was here, in monotonic nanoseconds."""
    landed_ns = 0
    steps: list[int] = []
    while True:
        event = await stream.read(_EVENT_TIMEOUT_S)
        now = time.monotonic_ns()
        if event.HasField("landed"):
            landed_ns = now
        elif event.HasField("tokens"):
            if event.tokens.ids:
                steps.append(now)
            if event.tokens.finish != pb.Tokens.NONE:
                break
    if len(steps) < 3:
        raise ProcessError(f"the daemon ended an answer after {len(steps)} steps, too few to time one: run it again")
    return landed_ns, steps
