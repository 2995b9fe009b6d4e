"""Events out of bytes that are cut anywhere."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.sse import EventReader


def read(*chunks: bytes) -> list[bytes]:
    reader = EventReader()
    return [event for chunk in chunks for event in reader.feed(chunk)]


TEXTS = st.lists(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=8), max_size=5)


@given(TEXTS, st.sampled_from([b"\n", b"\r\n"]), st.sampled_from([b"data:", b"data: "]), st.data())
def test_events_are_the_same_however_the_bytes_are_cut(texts: list[str], end: bytes, name: bytes, data: st.DataObject) -> None:
    events = [json.dumps(text, ensure_ascii=False).encode() for text in texts]
    whole = b"".join(name + event + end + end for event in events)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(whole)), max_size=6)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert read(*pieces) == events
    assert read(*(whole[i : i + 1] for i in range(len(whole)))) == events


def test_what_looks_like_a_line_end_inside_json_is_text() -> None:
    event = '{"text":"a\u2028b\u2029c\x85d\x0be"}'.encode()
    assert read(b"data: " + event + b"\n\n") == [event]


def test_comments_other_fields_and_empty_lines_are_no_events() -> None:
    assert read(b": ping\n\n: x\n\n\n", b"event: message\nid: 1\nretry: 5\n\n", b"data: 1\n: ping\n\n") == [b"1"]


def test_two_data_lines_are_one_event() -> None:
    assert read(b"data: {\ndata: }\n\n") == [b"{\n}"]


def test_an_event_that_was_not_ended_is_none() -> None:
    assert read(b"data: 1\n\ndata: 2\n") == [b"1"]


@pytest.mark.parametrize("chunk", [b"x" * (1 << 20), b"data: " + b"x" * (1 << 20) + b"\n"])
def test_an_event_without_end_is_refused(chunk: bytes) -> None:
    with pytest.raises(ValueError, match="longer than"):
        read(*[chunk] * 20)
