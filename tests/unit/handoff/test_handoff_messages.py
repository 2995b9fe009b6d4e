"""Control messages survive the wire, and nothing else passes for one."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from handoff.messages import (
    Abort,
    Accepted,
    Begin,
    Cancel,
    Final,
    Hello,
    MessageError,
    Refused,
    Rejected,
    Sent,
    Stopped,
    ToConnector,
    ToDaemon,
    Waiting,
    Welcome,
    decode_for_connector,
    decode_for_daemon,
    encode,
)
from tests.kit.handoff import LAYOUT, MODEL, signed

CLAIM = signed()
TO_DAEMON: list[ToDaemon] = [
    Hello(2, "engine", 0, 1, MODEL, LAYOUT, "nixl"),
    Begin(CLAIM, 10),
    Sent("id", 3, 10, 3, 4608),
    Final(CLAIM, b"\x01\x00\x00\x00", 7, finished=True),
    Abort(CLAIM, "no room"),
    Abort(CLAIM, "no room", writing=True),
    Stopped("id", 3),
]
TO_CONNECTOR: list[ToConnector] = [
    Welcome(2, "daemon", b"agent"),
    Refused("layers", "30", "32"),
    Accepted("id", 2**47, 4608),
    Rejected("id", "stale", hello=True),
    Cancel("id", 3, "the client left"),
    Waiting("id", 3),
]


@pytest.mark.parametrize("message", TO_DAEMON)
def test_a_message_to_a_daemon_comes_back_as_it_was_and_is_none_for_a_connector(message: ToDaemon) -> None:
    assert decode_for_daemon(encode(message)) == message
    with pytest.raises(MessageError):
        decode_for_connector(encode(message))


@pytest.mark.parametrize("message", TO_CONNECTOR)
def test_a_message_to_a_connector_comes_back_as_it_was_and_is_none_for_a_daemon(message: ToConnector) -> None:
    assert decode_for_connector(encode(message)) == message
    with pytest.raises(MessageError):
        decode_for_daemon(encode(message))


def objects(value: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """Where in a decoded message an object stands."""
    if isinstance(value, dict):
        return [path, *(found for name, inner in value.items() for found in objects(inner, (*path, name)))]
    if isinstance(value, list):
        return [found for index, inner in enumerate(value) for found in objects(inner, (*path, index))]
    return []


@pytest.mark.parametrize("message", [*TO_DAEMON, *TO_CONNECTOR])
def test_an_unknown_field_anywhere_in_a_message_is_refused(message: ToDaemon | ToConnector) -> None:
    decode = decode_for_daemon if message in TO_DAEMON else decode_for_connector
    for path in objects(msgspec.msgpack.decode(encode(message))):
        raw = msgspec.msgpack.decode(encode(message))
        target = raw
        for step in path:
            target = target[step]
        target["surprise"] = 1
        with pytest.raises(MessageError):
            decode(msgspec.msgpack.encode(raw))


def refused(frame: bytes) -> None:
    for decode in (decode_for_daemon, decode_for_connector):
        with pytest.raises(MessageError):
            decode(frame)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(frame: bytes) -> None:
    refused(frame)


@given(st.sampled_from([*TO_DAEMON, *TO_CONNECTOR]), st.data())
def test_a_damaged_message_is_read_or_refused_and_never_fails_otherwise(
    message: ToDaemon | ToConnector, data: st.DataObject
) -> None:
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    del frame[data.draw(st.integers(1, len(frame))) :]
    for decode in (decode_for_daemon, decode_for_connector):
        try:
            assert encode(decode(bytes(frame)))
        except MessageError:
            continue


@pytest.mark.parametrize("depth", [10, 10_000, 1_000_000])
def test_deep_nesting_is_refused(depth: int) -> None:
    refused(b"\x91" * depth)
    refused(b"\x81\xa4aaaa" + b"\x91" * depth)
    refused(b"\x81\xa4type" + b"\x81\xa1a" * depth)


def test_a_refusal_says_what_differs_and_both_values() -> None:
    assert Refused("layers", "30", "32").describe() == "layers differs: the connector has 30, the daemon has 32"
