"""The headers that choose the lane: whatever a client writes there is one of three classes."""

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
