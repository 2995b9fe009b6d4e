"""Envoy's messages, read and built."""

import pytest
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue
from hypothesis import given
from hypothesis import strategies as st

from extproc import messages
from gateway.errors import NoSlotInTime
from tests.kit.ext_proc import header_map


@given(st.lists(st.binary(max_size=8), min_size=1, max_size=4))
def test_headers_are_joined_by_commas_and_any_bytes_can_be_had_back(values: list[bytes]) -> None:
    read = messages.read_headers(header_map([("x", value) for value in values]))
    assert read["x"].encode("latin-1") == b",".join(values)


def test_a_header_told_as_text_is_read_too() -> None:
    assert messages.read_headers(HeaderMap(headers=[HeaderValue(key="x", value="y")])) == {"x": "y"}


def test_a_body_of_another_length_brings_its_length() -> None:
    common = messages.body_replaced("é".encode(), {}).request_body.response
    headers = {option.header.key: option.header.raw_value for option in common.header_mutation.set_headers}
    assert headers == {"content-length": b"2", "accept-encoding": b"identity"}


@pytest.mark.parametrize("headers", [{}, {"content-length": "5"}])
def test_a_length_that_is_not_known_is_removed(headers: dict[str, str]) -> None:
    mutation = messages.response_headers(headers).response_headers.response.header_mutation
    assert set(mutation.remove_headers) == {"content-encoding", "etag", "content-md5"} | (
        set() if headers else {"content-length"}
    )


def test_an_immediate_answer_says_when_to_come_again() -> None:
    answer = messages.immediate(NoSlotInTime("busy", code="no_free_slot", retry_after_s=1), {"reason": "no_free_slot"})
    headers = {option.header.key: option.header.raw_value for option in answer.immediate_response.headers.set_headers}
    assert answer.immediate_response.status.code == 429
    assert headers["retry-after"] == b"1"
    assert answer.immediate_response.details == "anchorleg_no_free_slot"
