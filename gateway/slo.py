"""What a client asks for in headers: the SLO class, how long it would wait, whether the throughput lane may stand in.

`x-slo-class` is compared without case and surrounding space; any other value than the ones here, and more than one value, is
the unknown class, which plain vLLM serves.

`x-slo-max-wait-ms` is a decimal integer, digits and surrounding space and nothing else. Whatever else stands there, a sign or a
second value among it, counts as if the header were absent: a mistyped hint is no reason to refuse a request.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

CLASS_HEADER = "x-slo-class"
FALLBACK_HEADER = "x-slo-fallback"
MAX_WAIT_HEADER = "x-slo-max-wait-ms"
SPECULATION_HEADER = "x-slo-speculation"

_LONGEST_WAIT_MS = 10**9
_DIGITS = len(str(_LONGEST_WAIT_MS)) - 1


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
    wait_ms: int | None = None  # as it was asked for; None: the gateway's default
    speculate: bool = True  # False: one token a step; the answer is the same
    tenant: str | None = None  # the tenant header's value, as it came; None: absent, or no header is named for it


def read_wish(headers: Mapping[str, str], tenant_header: str = "") -> Wish:
    """Read the headers (lower-case names)."""
    value = headers.get(CLASS_HEADER, "").strip().lower()
    known = value in (SloClass.LATENCY, SloClass.THROUGHPUT)
    return Wish(
        slo_class=SloClass(value) if known else SloClass.UNKNOWN,
        fallback=headers.get(FALLBACK_HEADER, "").strip().lower() != "deny",
        wait_ms=_milliseconds(headers.get(MAX_WAIT_HEADER, "")),
        speculate=headers.get(SPECULATION_HEADER, "").strip().lower() != "off",
        tenant=headers.get(tenant_header) if tenant_header else None,
    )


def _milliseconds(text: str) -> int | None:
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit()):
        return None
    digits = digits.lstrip("0") or "0"
    # Python refuses to read numbers of thousands of digits.
    return int(digits) if len(digits) <= _DIGITS else _LONGEST_WAIT_MS
