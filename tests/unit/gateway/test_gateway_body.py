"""A body's members: where they stand, what they say, and that what is kept is kept byte for byte."""

import json
import math
from collections.abc import Callable
from json.decoder import scanstring  # type: ignore[attr-defined]  # not in typeshed
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import gateway.body
from gateway.body import Body, NotAnObject

SPACE = st.text(alphabet=" \t\n\r", max_size=3)
KEYS = st.text(max_size=6)


@st.composite
def literals(draw: st.DrawFn) -> str:
    """A string as JSON may write it: plain, or with any character escaped."""
    text = draw(st.text(max_size=12))
    parts = []
    for character in text:
        escape = draw(st.booleans())
        units = character.encode("utf-16-be")
        escaped = "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))
        parts.append(escaped if escape else json.dumps(character, ensure_ascii=False)[1:-1])
    return f'"{"".join(parts)}"'


NUMBERS = st.one_of(
    st.integers().map(str),
    st.integers(min_value=10**40, max_value=10**60).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.sampled_from(["-0", "0.10", "1E+2", "1e-7", "1.000000000000000000000000001", "1e999", "-1e999"]),
)


def _array(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.builds(lambda items, a, b: "[" + a + f"{b},{a}".join(items) + b + "]", st.lists(inner, max_size=4), SPACE, SPACE)


def _object(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    member = st.builds(lambda key, a, b, value: f"{key}{a}:{b}{value}", literals(), SPACE, SPACE, inner)
    return st.builds(lambda items, a, b: "{" + a + f"{b},{a}".join(items) + b + "}", st.lists(member, max_size=4), SPACE, SPACE)


BODY = settings(max_examples=60)  # such objects take long to make

VALUES = st.recursive(
    st.one_of(literals(), NUMBERS, st.sampled_from(["true", "false", "null"])),
    lambda inner: st.one_of(_array(inner), _object(inner)),
    max_leaves=12,
)
OBJECTS = st.builds(lambda before, text, after: before + text + after, SPACE, _object(VALUES), SPACE)


def members(raw: str) -> dict[str, Any]:
    body = Body(raw.encode())
    return {key: body.get(key) for key in json.loads(raw)}


@BODY
@given(OBJECTS)
@example('{"a":1,"b":2,"a":3}')
@example('{"\\ud83d\\ude42":"\\uD83D\\uDE42","":null}')
@example('{"a":"\\ud800"}')
def test_every_object_says_what_json_says(raw: str) -> None:
    assert members(raw) == json.loads(raw)


@BODY
@given(OBJECTS, st.data())
def test_a_rewritten_body_keeps_its_members_byte_for_byte_and_has_the_extra_ones(raw: str, data: st.DataObject) -> None:
    said = json.loads(raw)
    keep = data.draw(st.lists(st.sampled_from(sorted(said)), unique=True)) if said else []
    extra = {"max_tokens": 1, "stream": False, 'kv "params"': {"host": "ü"}}
    rewritten = Body(raw.encode()).with_members([*keep, "absent"], extra).decode()
    assert json.loads(rewritten) == {key: said[key] for key in keep} | extra
    for key in keep:
        assert as_written(raw, key) in rewritten


def as_written(raw: str, key: str) -> str:
    """The bytes of a member's last occurrence, found by json's own scanner."""
    decoder = json.JSONDecoder()
    position, found = raw.index("{") + 1, ""
    while True:
        position += len(raw[position:]) - len(raw[position:].lstrip(" \t\n\r,"))
        if raw[position] == "}":
            return found
        name, end = decoder.raw_decode(raw, position)
        value = raw.index(":", end) + 1
        value += len(raw[value:]) - len(raw[value:].lstrip(" \t\n\r"))
        _, end = decoder.raw_decode(raw, value)
        if name == key:
            found = raw[position:end]
        position = end


def parse(raw: bytes) -> Body | None:
    """Fails the test on any other exception than NotAnObject."""
    try:
        return Body(raw)
    except NotAnObject:
        return None


@given(st.binary(max_size=64))
def test_random_bytes_are_an_object_or_not_one(raw: bytes) -> None:
    parsed = parse(raw)
    if parsed is not None:
        assert isinstance(json.loads(raw), dict)


@BODY
@given(OBJECTS, st.integers(min_value=0), st.integers(min_value=0, max_value=3), st.binary(max_size=3))
def test_a_mutilated_object_is_refused_just_when_json_refuses_it(raw: str, at: int, cut: int, put: bytes) -> None:
    whole = raw.encode()
    at %= len(whole) + 1
    broken = whole[:at] + put + whole[at + cut :]
    try:
        expected = json.loads(broken.decode())
    except (ValueError, RecursionError):
        expected = None
    parsed = parse(broken)
    assert (parsed is not None) == isinstance(expected, dict)
    if parsed is not None:
        assert {key: parsed.get(key) for key in expected} == expected


NO_OBJECTS = [
    *(
        b"",
        b" ",
        b"[]",
        b'"text"',
        b"1",
        b"null",
        b"{",
        b'{"a"',
        b'{"a":',
        b'{"a":}',
        b'{"a":1',
        b'{"a":1,',
        b'{"a":1,}',
        b"{,}",
    ),
    *(
        b"{x}",
        b"{'a':1}",
        b'{"a" 1}',
        b'{"a":1 "b":2}',
        b"{}{}",
        b"{} x",
        b'{"a":01}',
        b'{"a":+1}',
        b'{"a":"\n"}',
        b'{"a":"\\x"}',
    ),
    *(b'{"a":\xff}', b'{"a":"\xed\xa0\x80"}', b"\xef\xbb\xbf{}", '{"a":1}'.encode("utf-16"), b'{"a":1\x00}', b"\x0b{}"),
]


@pytest.mark.parametrize("raw", NO_OBJECTS)
def test_what_is_no_utf8_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(NotAnObject):
        Body(raw)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"])
def test_nesting_without_end_is_refused(text: str) -> None:
    with pytest.raises(NotAnObject):
        Body(text.encode())


def test_a_number_too_long_for_python_is_refused_as_json_refuses_it() -> None:
    with pytest.raises(NotAnObject):
        Body(b'{"a":' + b"9" * 5_000 + b"}")


def test_null_reads_as_absent() -> None:
    body = Body(b'{"a":null,"b":false,"c":0}')
    assert body.get("a") is None
    assert body.get("d") is None
    assert dict(body.items()) == {"a": None, "b": False, "c": 0}
    assert ("a" in body, "d" in body) == (True, False)


def lone_surrogates(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


@BODY
@given(OBJECTS)
@example('{"a":"\\ud83d\\ude42"}')
@example('{"a":["\\ud83d \\ude42"]}')
@example('{"a":{"\\uDFFF":1}}')
@example('{"a":"\\\\ud83d"}')
@example('{"\\ud83d":1}')
def test_half_of_a_surrogate_pair_is_found_wherever_it_is(raw: str) -> None:
    assert Body(raw.encode()).has_lone_surrogates() is lone_surrogates(json.loads(raw))


def test_infinity_reads_as_json_reads_it() -> None:
    assert math.isinf(Body(b'{"a":1e999}').get("a"))


def count_scans(monkeypatch: pytest.MonkeyPatch, raw: bytes) -> tuple[int, int]:
    """Calls of the scanners that walk over text, and the characters they walked over."""
    calls = walked = 0

    def counting(scan: Callable[..., tuple[Any, int]]) -> Callable[..., tuple[Any, int]]:
        def counted(text: str, start: int, *rest: Any) -> tuple[Any, int]:
            nonlocal calls, walked
            value, end = scan(text, start, *rest)
            calls, walked = calls + 1, walked + end - start
            return value, end

        return counted

    with monkeypatch.context() as patch:
        patch.setattr(gateway.body, "_scan_value", counting(gateway.body._scan_value))
        patch.setattr(gateway.body, "scanstring", counting(scanstring))
        Body(raw).with_members(["messages"], {"max_tokens": 1})
    return calls, walked


def test_a_megabyte_is_walked_over_once(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = json.dumps({"messages": [{"role": "user", "content": "x" * 1_000_000}], "stop": ["a"] * 10}).encode()
    calls, walked = count_scans(monkeypatch, raw)
    assert calls == 2 * 2  # a key and a value for each member
    assert walked <= len(raw)


def test_a_body_of_a_thousand_members_is_not_looked_into() -> None:
    raw = b"{" + b",".join(b'"k%d":0' % n for n in range(1000)) + b"}"
    with pytest.raises(NotAnObject, match="more than 256 members"):
        Body(raw)


def test_work_grows_with_the_number_of_members_and_no_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = json.dumps({f"k{n}": n for n in range(250)}).encode()
    calls, walked = count_scans(monkeypatch, raw)
    assert calls == 500
    assert walked <= len(raw)
