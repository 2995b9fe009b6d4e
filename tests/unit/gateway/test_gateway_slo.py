"""The headers that choose the lane: whatever a client writes there is one of three classes, and a time or none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.slo import SloClass, Wish, read_wish


@pytest.mark.parametrize(
    ("value", "slo_class"),
    [
        ("latency", SloClass.LATENCY),
        ("LATENCY", SloClass.LATENCY),
        (" latency ", SloClass.LATENCY),
        ("\tLatency", SloClass.LATENCY),
        ("throughput", SloClass.THROUGHPUT),
        ("Throughput", SloClass.THROUGHPUT),
        ("latency,latency", SloClass.UNKNOWN),
        ("latency,", SloClass.UNKNOWN),
        ("", SloClass.UNKNOWN),
        (" ", SloClass.UNKNOWN),
        ("bogus", SloClass.UNKNOWN),
        ("unknown", SloClass.UNKNOWN),
        ("l" * 65_536, SloClass.UNKNOWN),
        ("latency\x00", SloClass.UNKNOWN),
    ],
)
def test_a_class_is_read_without_case_and_surrounding_space_and_nothing_else_is_one(value: str, slo_class: SloClass) -> None:
    assert read_wish({"x-slo-class": value}).slo_class is slo_class


def test_without_the_header_the_class_is_unknown() -> None:
    assert read_wish({}) == Wish(SloClass.UNKNOWN, fallback=True)


@pytest.mark.parametrize(
    ("value", "fallback"),
    [("deny", False), ("DENY ", False), ("allow", True), ("", True), ("bogus", True), ("deny,deny", True), ("d" * 9000, True)],
)
def test_only_deny_forbids_the_throughput_lane(value: str, fallback: bool) -> None:
    assert read_wish({"x-slo-class": "latency", "x-slo-fallback": value}).fallback is fallback


@given(st.text())
def test_any_value_is_one_of_few(value: str) -> None:
    assert read_wish({"x-slo-class": value}).slo_class in SloClass


@pytest.mark.parametrize(
    ("value", "wait_ms"),
    [
        ("0", 0),
        ("250", 250),
        (" 250\t", 250),
        ("000250", 250),
        ("0" * 5000 + "7", 7),
        ("999999999", 999_999_999),
        ("1000000000", 10**9),
        ("9" * 100_000, 10**9),
        ("", None),
        (" ", None),
        ("-1", None),
        ("+1", None),
        ("1.5", None),
        ("1e3", None),
        ("1_000", None),
        ("100,200", None),
        ("1 2", None),
        ("250ms", None),
        ("0x10", None),
        ("²", None),
        ("٣", None),
        ("inf", None),
        ("\x00", None),
    ],
)
def test_a_wait_is_a_decimal_number_and_anything_else_is_none_at_all(value: str, wait_ms: int | None) -> None:
    assert read_wish({"x-slo-class": "latency", "x-slo-max-wait-ms": value}).wait_ms == wait_ms


@given(st.text())
def test_any_wait_is_a_time_or_none(value: str) -> None:
    wait_ms = read_wish({"x-slo-max-wait-ms": value}).wait_ms
    assert wait_ms is None or 0 <= wait_ms <= 10**9


def test_a_tenant_is_read_from_the_header_that_is_named_for_it_and_from_no_other() -> None:
    headers = {"x-slo-class": "latency", "x-tenant": " a,b ", "": "nobody"}
    assert read_wish(headers, "x-tenant").tenant == " a,b "
    assert read_wish(headers, "x-other").tenant is None
    assert read_wish(headers).tenant is None


@pytest.mark.parametrize(
    ("value", "speculate"), [("off", False), (" OFF ", False), ("on", True), ("", True), ("off,off", True)]
)
def test_speculation_is_left_to_the_daemon_unless_it_is_off(value: str, speculate: bool) -> None:
    assert read_wish({"x-slo-class": "latency", "x-slo-speculation": value}).speculate is speculate
    assert read_wish({"x-slo-class": "latency"}).speculate
