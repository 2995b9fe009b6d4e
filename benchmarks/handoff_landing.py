"""A daemon without an engine, in a process of its own: real slots, control socket and transport, and the times of landing.

What lands is released at once: a prefill that is measured against it never waits for a decode.
"""

import asyncio
import itertools
import multiprocessing
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

import structlog
import uvloop

from decode_daemon.memory import LandingMemory
from decode_daemon.receiver import Expectation, Receiver
from decode_daemon.slots import HandoffFailed, LandingSlot, Occupancy
from handoff.claim import Claim, ClaimKeys, SignedClaim, new_handoff_id
from handoff.transports import TransportName, open_transport
from process.errors import ProcessError

_START_TIMEOUT_S = 60.0
_ANSWER_TIMEOUT_S = 30.0
_WRITER_GRACE_S = 5.0
_CLAIM_LIFE_S = 600
_WAKE_S = 0.01  # for the far end to look


@dataclass(frozen=True, slots=True)
class Plan:
    """What the process is to receive."""

    transport: TransportName
    secret: bytes
    expectation: Expectation
    slots: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class Listening:
    """Where it receives: the control port, and memory for raw writes of `slot_bytes` bytes."""

    port: int
    agent: bytes
    raw_address: int


@dataclass(frozen=True, slots=True)
class _Reserve:
    slot: int
    handoff_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class _Attend:
    """Raw writes come (or come no more): take part in the transport without delay."""

    on: bool


@dataclass(frozen=True, slots=True)
class _Reserved:
    slot: int


@dataclass(frozen=True, slots=True)
class _Landed:
    slot: int
    at_ns: int
    failure: str = ""


_Answer = _Reserved | _Landed | None


@asynccontextmanager
async def landing(plan: Plan) -> AsyncIterator["Landing"]:
    """Start the process; it ends with the block. Raises ProcessError when it does not start."""
    context = multiprocessing.get_context("spawn")  # not forked: an event loop and a transport's threads run here
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs, plan), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Landing(ours, plan, await asyncio.to_thread(_listening, ours))
    finally:
        asyncio.get_running_loop().remove_reader(ours.fileno())
        process.kill()
        process.join()
        ours.close()


class Landing:
    """Made by `landing`."""

    def __init__(self, pipe: Connection, plan: Plan, listening: Listening) -> None:
        self.plan = plan
        self.listening = listening
        self._pipe = pipe
        self._keys = ClaimKeys([plan.secret])
        self._epochs = itertools.count(1)
        self._answers: list[asyncio.Queue[_Answer]] = [asyncio.Queue() for _ in range(plan.slots)]
        asyncio.get_running_loop().add_reader(pipe.fileno(), self._receive)

    async def reserve(self, slot: int) -> SignedClaim:
        """Hold a slot as a gateway's stream does; returns the claim on it, signed as a gateway signs."""
        epoch = next(self._epochs)
        expires = int(time.time()) + _CLAIM_LIFE_S
        claim = Claim(new_handoff_id(), "127.0.0.1", self.listening.port, slot, epoch, expires)
        self._pipe.send(_Reserve(slot, claim.handoff_id, epoch))
        answer = await self._answer(slot)
        assert isinstance(answer, _Reserved), answer
        return self._keys.sign(claim)

    async def landed(self, slot: int) -> int:
        """Return when what the slot is reserved for was whole, in time.monotonic_ns of this machine; the slot is free then.

        Raises ProcessError when it will not be.
        """
        answer = await self._answer(slot)
        assert isinstance(answer, _Landed), answer
        if answer.failure:
            raise ProcessError(f"a handoff to slot {slot} failed: {answer.failure}")
        return answer.at_ns

    @contextmanager
    def attended(self) -> Iterator[None]:
        """Within the block the process takes part in raw writes, as a daemon does where a handoff has begun."""
        self._pipe.send(_Attend(True))
        time.sleep(_WAKE_S)
        try:
            yield
        finally:
            self._pipe.send(_Attend(False))

    async def _answer(self, slot: int) -> _Answer:
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                answer = await self._answers[slot].get()
        except TimeoutError:
            raise ProcessError(f"nothing landed in slot {slot} within {_ANSWER_TIMEOUT_S:g} s: see vLLM's log") from None
        if answer is None:
            raise ProcessError("the process that receives is gone: run the benchmark again, with more memory free")
        return answer

    def _receive(self) -> None:
        try:
            answer = self._pipe.recv()
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self._pipe.fileno())
            for answers in self._answers:
                answers.put_nowait(None)
            return
        self._answers[answer.slot].put_nowait(answer)


def _listening(pipe: Connection) -> Listening:
    try:
        if pipe.poll(_START_TIMEOUT_S):
            answer = pipe.recv()
            if isinstance(answer, Listening):
                return answer
            raise ProcessError(f"the process that receives did not start: {answer}")
    except EOFError:
        pass
    raise ProcessError(f"the process that receives did not start within {_START_TIMEOUT_S:g} s: its output is above")


def _run(pipe: Connection, plan: Plan) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this one
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))  # warnings and worse
    uvloop.run(_serve(pipe, plan))  # the loop that daemons run on


async def _serve(pipe: Connection, plan: Plan) -> None:
    slots: list[LandingSlot] = []
    raw_writes = False
    ended = asyncio.Event()
    async with AsyncExitStack() as stack:
        try:
            transport = open_transport(
                plan.transport, "bench-daemon", attend=lambda: raw_writes or any(slot.written_to for slot in slots)
            )
            stack.callback(transport.close)
            receiver = Receiver(
                daemon_id="bench",
                host="127.0.0.1",
                port=0,
                keys=ClaimKeys([plan.secret]),
                expectation=plan.expectation,
                transport=transport,
            )
            stack.push_async_callback(receiver.aclose)
            slots += [LandingSlot(i, LandingMemory(transport, plan.slot_bytes), receiver.send) for i in range(plan.slots)]
            raw = LandingMemory(transport, plan.slot_bytes)
        except Exception as error:  # whatever it is, the parent tells it
            pipe.send(f"{type(error).__name__}: {error}")
            raise
        receiver.start(slots)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())

        def obey(command: _Reserve | _Attend) -> None:
            nonlocal raw_writes
            if isinstance(command, _Attend):
                raw_writes = command.on
                transport.nudge()
                return
            held = slots[command.slot].reserve(command.handoff_id, command.epoch)
            pipe.send(_Reserved(command.slot))
            tasks.create_task(_tell(slots[command.slot], held, pipe))

        asyncio.get_running_loop().add_reader(pipe.fileno(), _commands(pipe, obey, ended))
        pipe.send(Listening(receiver.port, transport.metadata(), raw.address))
        await ended.wait()


def _commands(pipe: Connection, obey: Callable[[_Reserve | _Attend], None], ended: asyncio.Event) -> Callable[[], None]:
    def receive() -> None:
        try:
            obey(pipe.recv())
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(pipe.fileno())
            ended.set()

    return receive


async def _tell(slot: LandingSlot, held: Occupancy, pipe: Connection) -> None:
    failure = ""
    try:
        await asyncio.shield(held.landed)
    except HandoffFailed as error:
        failure = str(error)
    at_ns = time.monotonic_ns()
    await slot.release(held, "landed", _WRITER_GRACE_S)
    pipe.send(_Landed(slot.index, at_ns, failure))
