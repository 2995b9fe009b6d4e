"""What the journals of a soak prove, or disprove."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from tests.soak.records import TIMEOUT_S, Event

_NS = 1_000_000_000
_LATE_S = 1.5  # a whole call, and a busy machine, on top of a bound
_LAST_BEAT_S = 0.5  # a killed daemon's last heartbeat may still lie in the server's socket


@dataclass(frozen=True, slots=True)
class Ending:
    """What the table held after the last request."""

    slots: int  # of living daemons
    lost: tuple[str, ...]  # those that were not free in time
    free_after_s: float | None  # None: never
    whole_after_s: float | None  # from the server's restart until every daemon was back


@dataclass(frozen=True, slots=True)
class Verdict:
    """Figures by name, and every violation in words."""

    figures: dict[str, str]
    violations: list[str]


@dataclass(slots=True)
class _Stops:
    """When processes were held by SIGSTOP: what they do late then is no fault of the table."""

    spans: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def read(cls, events: list[Event]) -> "_Stops":
        stops, since = cls(), dict[str, int]()
        for event in events:
            if event["what"] == "stop":
                since[event["name"]] = event["ns"]
            elif event["what"] in ("cont", "kill") and event["name"] in since:
                stops.spans[event["name"]].append((since.pop(event["name"]), event["ns"]))
        return stops

    def touch(self, process: str, begin: int, end: int) -> bool:
        return any(first <= end and begin <= last for first, last in self.spans[process])


def judge(events: list[Event], ending: Ending, ttl_ms: int, slack_s: float = 0.0) -> Verdict:
    """Count everything, and hold it against what must never be; a busy machine may take `slack_s` longer for all of it."""
    stops = _Stops.read(events)
    by_kind: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_kind[event["what"]].append(event)
    grants, reserved = by_kind["grant"], by_kind["reserve"]
    waits = [_seconds(event) for event in grants if event["wait_ms"]]
    live = [event for event in grants + by_kind["denied"] if not stops.touch(event["by"], event["began"], event["ns"])]
    double = list(_double_reservations(events))
    repeated = list(_repeated_epochs(reserved))
    twice = list(_double_grants(grants))
    dead = list(_grants_of_the_dead(events, stops, ttl_ms + round(1000 * min(slack_s, 1))))
    late = [event for event in live if _seconds(event) > event["wait_ms"] / 1_000 + TIMEOUT_S + _LATE_S + slack_s]
    refusals = Counter(event["reason"] for event in by_kind["refuse"])
    denials = Counter(event["reason"] for event in by_kind["denied"])
    violations = double + repeated + twice + dead + [f"slot {slot} is lost" for slot in ending.lost]
    violations += [f"a live waiter got no answer within its bound: {event}" for event in late]
    if ending.free_after_s is None:
        violations.append(f"not all slots were free {ttl_ms / 1_000 + 1 + slack_s:g} s after the last request")
    if ending.whole_after_s is None or ending.whole_after_s > 2 + slack_s:
        violations.append(
            f"the table was whole again {ending.whole_after_s} s after the server's restart, not within {2 + slack_s:g} s"
        )
    if not reserved or not waits or not any(event["what"] == "kill" for event in events):
        violations.append("nothing was proven: no reservation, no wait served, or nothing killed")
    figures = {
        "grants": str(len(grants)),
        "reservations at daemons": str(len(reserved)),
        "double grants": str(len(twice)),
        "double reservations": str(len(double)),
        "epochs reserved twice": str(len(repeated)),
        "grants of dead daemons": str(len(dead)),
        "slots lost": f"{len(ending.lost)} of {ending.slots}",
        "all free after the last request": _s(ending.free_after_s),
        "table whole after a restart": _s(ending.whole_after_s),
        "waits served": str(sum(wait > 0.02 for wait in waits)),
        "longest wait of a live waiter": _s(max((_seconds(event) for event in live if event["wait_ms"]), default=0.0)),
        "refused by daemons": _counted(refusals),
        "grants of no use to a gateway": _counted(Counter(event["reason"] for event in by_kind["unused"])),
        "denied": _counted(denials),
        "left while waiting": str(len(by_kind["leave"])),
        "leases forgotten": str(len(by_kind["forget"])),
        "calls that found no server": str(len(by_kind["unavailable"])),
        "killed / stopped": f"{len(by_kind['kill'])} / {len(by_kind['stop'])}",
    }
    return Verdict(figures, violations)


def _double_reservations(events: list[Event]) -> Iterator[str]:
    held: dict[tuple[str, int], Event] = {}
    for event in events:
        if event["what"] == "reserve":
            if other := held.get(_slot(event)):
                yield f"slot {_slot(event)} was reserved by {event} while it was held by {other}"
            held[_slot(event)] = event
        elif event["what"] == "finish" and held.get(_slot(event), {}).get("epoch") == event["epoch"]:
            del held[_slot(event)]


def _repeated_epochs(reserved: list[Event]) -> Iterator[str]:
    epochs: dict[tuple[str, int], list[int]] = defaultdict(list)
    for event in reserved:
        epochs[_slot(event)].append(event["epoch"])
    for slot, numbers in epochs.items():
        for first, second in pairwise(numbers):
            if second <= first:
                yield f"slot {slot} was reserved for epoch {second} after epoch {first}"


def _double_grants(grants: list[Event]) -> Iterator[str]:
    owners: dict[tuple[str, int, int], str] = {}
    for event in grants:
        lease = (*_slot(event), event["epoch"])
        if owners.setdefault(lease, event["nonce"]) != event["nonce"]:
            yield f"{lease} was granted to {owners[lease]} and to {event['nonce']}"


def _grants_of_the_dead(events: list[Event], stops: _Stops, ttl_ms: int) -> Iterator[str]:
    """A grant that was asked for when its daemon had been gone for longer than its heartbeat counts."""
    died = {event["name"]: event["ns"] for event in events if event["what"] == "kill"}
    for event in events:
        if event["what"] == "grant" and not event["wait_ms"]:
            death = died.get(event["node"].rpartition("-")[0])
            if (
                death
                and event["began"] > death + ttl_ms * 1_000_000 + _LAST_BEAT_S * _NS
                and not stops.touch(event["by"], event["began"], event["ns"])
            ):
                yield f"{event} is of a daemon that was killed {(event['ns'] - death) / _NS:.3f} s before"


def _slot(event: Event) -> tuple[str, int]:
    return event["node"], event["slot"]


def _seconds(event: Event) -> float:
    taken: int = event["ns"] - event["began"]
    return taken / _NS


def _s(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.2f} s"


def _counted(reasons: Counter[str]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items())) or "none"
