"""Sends each case down both lanes of a running stack and judges the pair of answers."""

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import httpx

from tests.fidelity.answer import Answer, read
from tests.fidelity.case import Case, Path
from tests.fidelity.compare import Difference, differences
from tests.fidelity.near_tie import NearTie, parting
from tests.kit.lane import LATENCY

PLAIN_AT_ONCE = 16
LANE_AT_ONCE = 2
_WAIT = {"x-slo-max-wait-ms": "60000"}
_DENY = {"x-slo-fallback": "deny"}

Verdict = Literal["equal", "allowed", "near tie", "different"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one case. `denied` is the answer to a client that forbids plain vLLM, where the lane does not serve it."""

    case: Case
    plain: Answer
    lane: Answer
    differences: tuple[Difference, ...]
    denied: Answer | None = None
    near_tie: NearTie | None = None
    faults: tuple[str, ...] = field(default=())

    @property
    def unexplained(self) -> list[Difference]:
        """Differences that may not be."""
        return [difference for difference in self.differences if difference.allowed is None]

    @property
    def verdict(self) -> Verdict:
        """What the comparison says, apart from `faults`."""
        if self.unexplained:
            return "different" if self.near_tie is None else "near tie"
        return "allowed" if any(d.allowed and not _always(d) for d in self.differences) else "equal"

    @property
    def holds(self) -> bool:
        """Whether the case is as it should be."""
        return self.verdict != "different" and not self.faults

    def __str__(self) -> str:
        lines = [f"{self.case.name}: {self.verdict}; lane {self.lane.lane or '-'}, reason {self.lane.reason or '-'}"]
        lines += self.faults
        lines += map(str, self.unexplained[:12])
        return "\n  ".join(lines)


def _always(difference: Difference) -> bool:
    """Whether no two answers agree in this, even of one lane."""
    return difference.path in ("id", "created") or difference.path.startswith("header ")


@dataclass(slots=True)
class BothLanes:
    """The two ways to one vLLM."""

    client: httpx.AsyncClient
    plain_at_once: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(PLAIN_AT_ONCE))
    lane_at_once: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(LANE_AT_ONCE))

    async def plain(self, case: Case) -> Answer:
        """Ask plain vLLM, through Envoy."""
        async with self.plain_at_once:
            return await self.send(case, in_lane=False)

    async def lane(self, case: Case) -> Answer:
        """Ask the lane; it may pass the request on to plain vLLM."""
        async with self.lane_at_once:
            return await self.send(case, in_lane=True)

    async def denied(self, case: Case) -> Answer:
        """Ask the lane, and plain vLLM shall not stand in."""
        async with self.lane_at_once:
            return await self.send(case, in_lane=True, more=_DENY)

    async def outcome(self, case: Case) -> Outcome:
        """Send one case down both lanes."""
        plain, lane = await asyncio.gather(self.plain(case), self.lane(case))
        denied = await self.denied(case) if _deniable(case) else None
        found = tuple(differences(case, plain, lane))
        faults = (*_lane_faults(case, lane), *_error_faults(case, plain), *_denied_faults(case, denied))
        tie = None
        if any(d.allowed is None for d in found) and lane.lane == "latency" and not case.sampled:
            tie = await self._near_tie(case)
        return Outcome(case, plain, lane, found, denied, tie, faults)

    async def outcomes(self, cases: Iterable[Case], *, done: Callable[[Outcome], None] = lambda _: None) -> list[Outcome]:
        """Send all cases down both lanes: plain vLLM batches, the lane takes one after the other."""

        async def one(case: Case) -> Outcome:
            outcome = await self.outcome(case)
            done(outcome)
            return outcome

        return list(await asyncio.gather(*map(one, cases)))

    async def _near_tie(self, case: Case) -> NearTie | None:
        """Ask both lanes again, for logprobs, to see whether the answers part where two tokens are equally probable."""
        more: dict[str, Any] = {"logprobs": True, "top_logprobs": 5} if case.path == Path.CHAT else {"logprobs": 5}
        fields = case.fields | more | {"return_token_ids": True, "return_tokens_as_token_ids": True}
        fields.pop("stream_options", None)
        again = Case(case.name, case.path, fields | {"stream": False})
        plain, lane = await asyncio.gather(self.plain(again), self.lane(again))
        return parting(plain.value, lane.value) if plain.status == lane.status == 200 else None

    async def send(self, case: Case, *, in_lane: bool, more: Mapping[str, str] = MappingProxyType({})) -> Answer:
        """Send one case now, however many others are on their way."""
        body = case.body if isinstance(case.body, bytes) else json.dumps(_salted(case, in_lane)).encode()
        wish = {**LATENCY, **_WAIT, **case.lane_headers} if in_lane else {}
        headers = {"content-type": "application/json", **wish, **more, **case.headers}
        return read(await self.client.post(case.path, content=body, headers=headers))


def _salted(case: Case, in_lane: bool) -> dict[str, Any]:
    """The body; a `cache_salt` in it becomes the lane's own, so that neither finds the other's prefix in the cache."""
    fields = case.fields
    if isinstance(fields.get("cache_salt"), str):
        fields["cache_salt"] += "-lane" if in_lane else "-plain"
    return fields


def _deniable(case: Case) -> bool:
    """Whether a client that forbids plain vLLM is refused, where the lane does not serve it: not if it asked for plain vLLM."""
    return case.reason not in (None, "throughput_class") and not case.error


def _lane_faults(case: Case, lane: Answer) -> list[str]:
    if case.error:
        return []
    expected = ("latency", "ok") if case.reason is None else ("throughput", case.reason)
    return [] if (lane.lane, lane.reason) == expected else [f"expected {expected}, was {(lane.lane, lane.reason)}"]


def _error_faults(case: Case, plain: Answer) -> list[str]:
    if (plain.status >= 400) == case.error:
        return []
    return [f"vLLM answers {plain.status}: {plain.raw[:300]!r}"]


def _denied_faults(case: Case, denied: Answer | None) -> list[str]:
    if denied is None:
        return []
    error = (denied.value or {}).get("error", {})
    if denied.status != 400 or not error.get("message"):
        return [f"denied with {denied.status}: {denied.raw[:300]!r}"]
    if case.param is not None and (error.get("param") != case.param or case.param not in error["message"]):
        return [f"denied without naming {case.param}: {error}"]
    return []
