"""The gRPC token stream: reserve a slot, wait for the KV cache, decode, one message per engine step."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import grpc
import grpc.aio
import structlog

from decode_daemon.engine.protocol import Constraint, DecodeParams, EngineError, FinishReason, Step
from decode_daemon.grammar import Form, GrammarError, GrammarFailed, Grammars, GrammarUnsupported
from decode_daemon.metrics import DaemonMetrics
from decode_daemon.request import BadRequest, check_request, decode_params
from decode_daemon.runner import EngineRunner
from decode_daemon.slots import HandoffFailed, Landed, LandingSlot, Occupancy, SlotRefused
from handoff import decode_pb2 as pb
from handoff.claim import ClaimError, ClaimKeys, from_bytes
from handoff.decode_pb2_grpc import DecoderServicer

log = structlog.get_logger(__name__)

_FINISH = {None: pb.Tokens.NONE, FinishReason.STOP: pb.Tokens.STOP, FinishReason.LENGTH: pb.Tokens.LENGTH}

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]


class ReaderGone(Exception):  # noqa: N818 - not a fault of ours
    """Nobody reads what is written: the call was cancelled, or the reader has stalled."""

    def __init__(self, outcome: str, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class NothingLanded(Exception):  # noqa: N818 - as above
    """The KV cache is not there in time."""


class DecodeService(DecoderServicer):
    """Serves one pool of slots with one engine."""

    def __init__(
        self,
        *,
        card: pb.ModelCard,
        keys: ClaimKeys,
        slots: list[LandingSlot],
        runner: EngineRunner,
        metrics: DaemonMetrics,
        freed: Callable[[LandingSlot, int], Awaitable[None]],
        changed: Callable[[], None],
        landing_timeout: float,
        writer_grace: float,
        reader_grace: float,
        grammars: Grammars | None = None,
    ) -> None:
        """`freed` is told (slot, epoch) once a lease is over, `changed` whenever a slot's state changed.

        Without `grammars` a request with a grammar is refused.
        """
        self._card = card
        self._keys = keys
        self._slots = slots
        self._runner = runner
        self._metrics = metrics
        self._freed = freed
        self._changed = changed
        self._landing_timeout = landing_timeout
        self._writer_grace = writer_grace
        self._reader_grace = reader_grace
        self._grammars = grammars
        self._active = 0  # requests that hold a slot
        self._settled = asyncio.Event()
        self._settled.set()
        self._endings: set[asyncio.Task[None]] = set()
        self._limits: set[asyncio.Timeout] = set()  # of the requests that are being served
        self._cut = False
        self.draining = False  # told to the lease table, which then gives out no slot of this daemon
        self.served = 0  # requests that held a slot and have ended

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.ModelCard:  # noqa: N802
        """Return the model card."""
        return self._card

    # A coroutine that writes, not a generator that yields: each write can be bounded and cancelled.
    async def Decode(self, request: pb.DecodeRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """Serve one request; cancelling the call, at any stage, frees the slot."""
        try:
            slot, held = self._reserve(request)
        except SlotRefused as refusal:
            self._metrics.requests.labels("refused").inc()
            with suppress(ReaderGone):
                await self._fail(context, refusal.code, str(refusal))
            return
        outcome, message = "cancelled", ""
        held.owed = min(request.max_tokens or self._card.context_tokens, self._card.context_tokens)
        self._active += 1
        self._settled.clear()
        self._changed()
        try:
            outcome, message = await self._outcome(request, slot, held, context)
        finally:
            self._metrics.requests.labels(outcome).inc()
            # A task of its own: this one may be cancelled again while the slot is being freed.
            ending = asyncio.create_task(self._end(slot, held, outcome))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)
        if message:
            with suppress(ReaderGone):
                await self._fail(context, outcome, message)

    async def settle(self) -> None:
        """Wait until every request's slot is free."""
        await self._settled.wait()

    def cut(self) -> None:
        """End whatever is still served with an error on which the gateway resumes elsewhere, and refuse what comes."""
        self._cut = True
        for slot in self._slots:
            slot.retire()
        if self._limits:
            log.warning("streams cut: the drain has lasted its time; gateways resume them on vLLM", streams=len(self._limits))
        now = asyncio.get_running_loop().time()
        for limit in self._limits:
            limit.reschedule(now)

    def _reserve(self, request: pb.DecodeRequest) -> tuple[LandingSlot, Occupancy]:
        # Not while draining: the table gives nothing out by then, so this lease was granted before. Refusing it would cost its
        # client another round, and cost it the lane where no other daemon is free.
        if self._cut:
            raise SlotRefused("draining", "this daemon is shutting down")
        if request.slot >= len(self._slots):
            raise SlotRefused("no_such_slot", f"slot {request.slot} is not one of {len(self._slots)}")
        try:
            claim = self._keys.verify(from_bytes(request.claim))
        except ClaimError as error:
            raise SlotRefused("bad_claim", str(error)) from error
        if (claim.handoff_id, claim.slot, claim.epoch) != (request.handoff_id, request.slot, request.epoch):
            raise SlotRefused("bad_claim", f"the claim is for epoch {claim.epoch} of slot {claim.slot}")
        slot = self._slots[request.slot]
        return slot, slot.reserve(request.handoff_id, request.epoch)

    async def _outcome(
        self, request: pb.DecodeRequest, slot: LandingSlot, held: Occupancy, context: Context
    ) -> tuple[str, str]:
        """Serve, and return how that ended and what to tell the gateway; nothing if it knows or is away."""
        try:
            async with asyncio.timeout(None) as limit:
                self._limits.add(limit)
                try:
                    await self._serve(request, slot, held, context)
                finally:
                    self._limits.discard(limit)
        except NothingLanded as late:
            return "timeout", str(late)
        except ReaderGone as gone:
            log.info("reader gone", handoff=request.handoff_id, reason=str(gone))
            return gone.outcome, ""
        except (BadRequest, GrammarError) as error:
            log.info("request refused", handoff=request.handoff_id, code=error.code, reason=str(error))
            return error.code, str(error)
        except HandoffFailed as error:
            return "handoff_failed", str(error)
        except EngineError as error:
            log.error("decode failed", handoff=request.handoff_id, error=str(error))
            return "engine_failed", str(error)
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                return "draining", "this daemon has shut down before the answer was whole"
            log.exception("decode failed", handoff=request.handoff_id)
            return "internal_error", f"{type(error).__name__}: {error}"
        return "finished", ""

    async def _serve(self, request: pb.DecodeRequest, slot: LandingSlot, held: Occupancy, context: Context) -> None:
        check_request(request)
        grammar = await self._checked(request)
        await self._write(context, pb.DecodeEvent(reserved=pb.Reserved()))
        async with _meanwhile(self._compile(grammar, request.ending_token_ids)) as compiling:
            landed = await self._landing(held, compiling)
            self._metrics.handoff_bytes.inc(landed.bytes)
            self._metrics.landing_seconds.observe(landed.seconds)
            await self._write(context, pb.DecodeEvent(landed=_landed(landed)))
            if landed.finished:
                await self._write(context, _tokens(1, Step((), FinishReason.STOP)))
                return
            constraint = await self._compiled(compiling) if grammar else None
        held.decoding = True
        self._changed()
        params = decode_params(request, landed, self._card.context_tokens, constraint)
        await self._decode(landed, params, slot, held, context)

    async def _checked(self, request: pb.DecodeRequest) -> Form | None:
        """Return the request's grammar, if it has one. Raises GrammarUnsupported."""
        if not request.HasField("grammar"):
            return None
        if self._grammars is None:
            raise GrammarUnsupported("this daemon serves no grammars")
        form = Form.of(request.grammar)
        await self._grammars.check(form)
        return form

    async def _compile(self, grammar: Form | None, ending: Iterable[int]) -> Constraint | None:
        if grammar is None or self._grammars is None:
            return None
        return await self._grammars.constraint(grammar, ending)

    async def _landing(self, held: Occupancy, compiling: "asyncio.Task[Constraint | None]") -> Landed:
        """Wait for the KV cache. Raises NothingLanded, HandoffFailed, or GrammarFailed as soon as one of them is known."""
        try:
            async with asyncio.timeout(self._landing_timeout) as limit:
                await asyncio.wait((held.landed, compiling), return_when=asyncio.FIRST_COMPLETED)
                if compiling.done() and not held.landed.done():
                    compiling.result()
                return await asyncio.shield(held.landed)
        except TimeoutError:
            if not limit.expired():
                raise
            raise NothingLanded(f"no KV cache landed within {self._landing_timeout:g} s") from None

    async def _compiled(self, compiling: "asyncio.Task[Constraint | None]") -> Constraint | None:
        """Wait for the grammar of an answer that could go on."""
        assert self._grammars is not None
        try:
            async with asyncio.timeout(self._grammars.wait_s):
                return await compiling
        except TimeoutError:
            raise GrammarFailed(
                f"the grammar was not compiled {self._grammars.wait_s:g} s after the KV cache was there"
            ) from None

    async def _decode(self, landed: Landed, params: DecodeParams, slot: LandingSlot, held: Occupancy, context: Context) -> None:
        position = 1
        held.owed = params.max_tokens - position
        steps = self._runner.run(landed, slot.memory.view(landed.bytes), params)
        try:
            async for step in steps:
                # Counted first: a gateway that has read the last token may end the call at once.
                self._metrics.tokens.inc(len(step.ids))
                self._metrics.drafted.inc(step.drafted)
                self._metrics.accepted.inc(step.accepted)
                await self._write(context, _tokens(position, step))
                position += len(step.ids)
                held.owed = max(0, params.max_tokens - position)
        finally:
            await steps.aclose()

    async def _write(self, context: Context, event: pb.DecodeEvent) -> None:
        # Bounded: a gateway that stops reading must not hold the slot. Not with wait_for, which in Python 3.11 loses a
        # cancellation that comes together with the result.
        try:
            async with asyncio.timeout(self._reader_grace):
                await context.write(event)
        except TimeoutError:
            raise ReaderGone("reader_stalled", f"nobody read for {self._reader_grace:g} s") from None
        except grpc.aio.BaseError as error:  # a cancelled call may fail here before its task is cancelled
            raise ReaderGone("cancelled", str(error)) from None

    async def _fail(self, context: Context, code: str, message: str) -> None:
        await self._write(context, pb.DecodeEvent(failed=pb.Failed(code=code, message=message)))

    async def _end(self, slot: LandingSlot, held: Occupancy, outcome: str) -> None:
        try:
            await slot.release(held, outcome, self._writer_grace)
            await self._freed(slot, held.epoch)
        finally:
            self._active -= 1
            self.served += 1
            if not self._active:
                self._settled.set()
            self._changed()


def _landed(landed: Landed) -> pb.Landed:
    return pb.Landed(
        prompt_token_ids=landed.prompt,
        first_token=landed.first_token,
        bytes=landed.bytes,
        transfer_seconds=landed.seconds,
    )


def _tokens(position: int, step: Step) -> pb.DecodeEvent:
    logprobs = (
        pb.TokenLogprobs(logprob=one.logprob, top_ids=one.top_ids, top_logprobs=one.top_logprobs) for one in step.logprobs
    )
    return pb.DecodeEvent(tokens=pb.Tokens(position=position, ids=step.ids, finish=_FINISH[step.finish], logprobs=logprobs))


@asynccontextmanager
async def _meanwhile(work: Coroutine[Any, Any, T]) -> "AsyncIterator[asyncio.Task[T]]":
    """Run `work` beside the block; what it has not come to by the block's end is nobody's concern."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved: the block may have left before
    try:
        yield task
    finally:
        task.cancel()
