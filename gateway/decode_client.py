"""The gateway's end of the decode stream: one HTTP/2 channel per daemon, one call per request."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import grpc
import grpc.aio

from handoff import decode_pb2 as pb
from handoff.decode_pb2_grpc import DecoderStub

if TYPE_CHECKING:
    from handoff.decode_pb2_grpc import DecoderAsyncStub

_OPTIONS = [
    ("grpc.max_receive_message_length", 256 << 20),  # a tokenizer.json can be tens of megabytes
    ("grpc.keepalive_time_ms", 10_000),  # a daemon whose host vanished is noticed without traffic
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]

# What a daemon may say: the code becomes a metric's label, which no peer shall fill at will.
_DAEMON_CODES = frozenset(
    {
        "bad_claim",
        "bad_request",
        "draining",
        "internal_error",
        "reader_stalled",
        "slot_busy",
        "stale_epoch",
        "no_such_slot",
        "timeout",
        "handoff_failed",
        "engine_failed",
        "grammar_unsupported",
        "grammar_failed",
        "grammar_busy",
    }
)


class DecodeFailed(Exception):  # noqa: N818 - an outcome the lane acts on
    """A daemon refused, failed, or is not there: `code` is stable, the message names the daemon.

    `said` are the daemon's own words, where it had any.
    """

    def __init__(self, code: str, message: str, said: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.said = said


@dataclass(slots=True)
class _Channel:
    """One daemon's channel, and what tells whether it is still needed."""

    channel: grpc.aio.Channel
    stub: "DecoderAsyncStub"
    calls: int = 0  # that run
    last_used: float = 0.0  # time.monotonic() of the last call's begin or end

    def ended(self, _: Any) -> None:
        self.calls -= 1
        self.last_used = time.monotonic()


class DecodeClient:
    """Owns the channels. One that no call has used for `idle_s` seconds is closed by `close_idle`."""

    def __init__(self, *, idle_s: float = 60.0) -> None:
        self._idle_s = idle_s
        self._channels: dict[str, _Channel] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close every channel, with the streams that still run."""
        while self._channels:
            _, known = self._channels.popitem()
            await known.channel.close(None)

    async def close_idle(self) -> None:
        """Close the channels of daemons that nobody has spoken to for a while, such as those that are gone.

        None with a running stream. Does not wait for any daemon.
        """
        oldest = time.monotonic() - self._idle_s
        for endpoint in [name for name, known in self._channels.items() if not known.calls and known.last_used <= oldest]:
            await self._channels.pop(endpoint).channel.close(None)

    async def describe(self, endpoint: str, timeout_s: float) -> pb.ModelCard:
        """Return a daemon's card; raises DecodeFailed."""
        try:
            call = self._count(endpoint, lambda stub: stub.Describe(pb.DescribeRequest(), timeout=timeout_s))
            card: pb.ModelCard = await call
        except grpc.aio.AioRpcError as error:
            raise DecodeFailed("unreachable", f"daemon {endpoint} does not describe itself: {error.details()}") from error
        return card

    async def reserve(self, endpoint: str, request: pb.DecodeRequest, timeout_s: float) -> "DecodeStream":
        """Open a stream and wait for the daemon's word that the slot is held; raises DecodeFailed."""
        stream = DecodeStream(self._count(endpoint, lambda stub: stub.Decode(request)), endpoint)
        try:
            event = await stream.read(timeout_s)
            if event.WhichOneof("event") != "reserved":
                raise DecodeFailed("protocol", f"daemon {endpoint} began with {event.WhichOneof('event')}")
        except BaseException:
            stream.cancel()
            raise
        return stream

    def _count(self, endpoint: str, begin: "Callable[[DecoderAsyncStub], Any]") -> Any:
        """Begin a call on the daemon's channel, which stays open for as long as the call runs."""
        known = self._channels.get(endpoint)
        if known is None:
            channel = grpc.aio.insecure_channel(endpoint, options=_OPTIONS)
            known = self._channels[endpoint] = _Channel(channel, DecoderStub(channel))
        call = begin(known.stub)
        known.calls += 1
        known.last_used = time.monotonic()
        call.add_done_callback(known.ended)
        return call


class DecodeStream:
    """One request's events."""

    def __init__(self, call: Any, endpoint: str) -> None:
        self._call = call
        self.endpoint = endpoint

    async def read(self, timeout_s: float) -> pb.DecodeEvent:
        """Return the next event; raises DecodeFailed when the daemon fails, ends early, or takes longer than `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                event = await self._call.read()
        except TimeoutError as error:
            raise DecodeFailed("stalled", f"daemon {self.endpoint} said nothing for {timeout_s:g} s") from error
        except grpc.aio.AioRpcError as error:
            raise DecodeFailed("unreachable", f"daemon {self.endpoint}: {error.details()}") from error
        if event is grpc.aio.EOF:
            raise DecodeFailed("ended", f"daemon {self.endpoint} ended the stream too early")
        if event.WhichOneof("event") == "failed":
            code = event.failed.code if event.failed.code in _DAEMON_CODES else "daemon_failed"
            raise DecodeFailed(code, f"daemon {self.endpoint}: {event.failed.message}", event.failed.message)
        return event  # type: ignore[no-any-return]

    def cancel(self) -> None:
        """Give the request up: the daemon frees the slot. Idempotent, and harmless after the end."""
        self._call.cancel()
