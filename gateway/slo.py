"""What a client asks for in headers: the SLO class, and whether the throughput lane may stand in.

`x-slo-class` is compared without case and surrounding space; any other value than the ones here, and more than one value, is
the unknown class, which plain vLLM serves.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

CLASS_HEADER = "x-slo-class"
FALLBACK_HEADER = "x-slo-fallback"


class SloClass(StrEnum):
    """What a request asks for."""

    LATENCY = "latency"
    THROUGHPUT = "throughput"
    UNKNOWN = "unknown"


class Lane(StrEnum):
    """Who serves it: the value of `x-slo-lane`."""

    LATENCY = "latency"
    THROUGHPUT = "throughput"


@dataclass(frozen=True, slots=True)
class Wish:
    """A request's SLO headers, understood."""

    slo_class: SloClass
    fallback: bool  # False: an error rather than the throughput lane


def read_wish(headers: Mapping[str, str]) -> Wish:
    """Read the headers (lower-case names)."""
    value = headers.get(CLASS_HEADER, "").strip().lower()
    known = value in (SloClass.LATENCY, SloClass.THROUGHPUT)
    return Wish(
        slo_class=SloClass(value) if known else SloClass.UNKNOWN,
        fallback=headers.get(FALLBACK_HEADER, "").strip().lower() != "deny",
    )
