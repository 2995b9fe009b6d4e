"""What came of the cases, as tables: one row per case, one per lane and reason, one per allowed difference."""

from collections import Counter
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from tests.fidelity.allowed import ALLOWED, UNSEEN
from tests.fidelity.lanes import Outcome
from tests.fidelity.sampling import Drawn

_COLOURS = {"equal": "green", "allowed": "green", "near tie": "yellow", "different": "red"}


def show(outcomes: Iterable[Outcome], console: Console) -> bool:
    """Print the tables; returns whether every case is as it should be."""
    outcomes = list(outcomes)
    console.print(_cases(outcomes))
    console.print(_lanes(outcomes))
    console.print(_allowed())
    failed = [outcome for outcome in outcomes if not outcome.holds]
    for outcome in failed:
        console.print(str(outcome), markup=False, highlight=False)
    lane = sum(outcome.lane.lane == "latency" for outcome in outcomes)
    console.print(f"{len(outcomes)} cases, {lane} in the latency lane, {len(failed)} not as they should be")
    return not failed


def show_draws(drawn: Iterable[Drawn], console: Console) -> bool:
    """Print how well drawn tokens fit; returns whether all do."""
    drawn = list(drawn)
    if not drawn:
        return True
    table = Table(
        "setting",
        "draws of each lane",
        "lane",
        "plain vLLM",
        "lane and plain vLLM",
        title="First two tokens, drawn: p of a worse fit",
    )
    for one in drawn:
        fits = (f"{fit.probability:.3f} ({fit.freedom} df)" for fit in (one.lane, one.plain, one.each_other))
        table.add_row(one.setting.name, str(one.count), *fits)
    console.print(table)
    return all(one.holds for one in drawn)


def _cases(outcomes: list[Outcome]) -> Table:
    table = Table("case", "lane", "reason", "compared", "verdict", title="Both lanes, case by case")
    for outcome in outcomes:
        verdict = outcome.verdict if outcome.holds else "different"
        colour = _COLOURS[verdict]
        table.add_row(
            outcome.case.name,
            outcome.lane.lane or "-",
            outcome.lane.reason or "-",
            compared(outcome),
            f"[{colour}]{verdict if outcome.verdict != 'allowed' else _reasons(outcome)}[/]",
        )
    return table


def _lanes(outcomes: list[Outcome]) -> Table:
    table = Table("lane", "reason", "cases", "as they should be", title="By lane and reason")
    rows = Counter((outcome.lane.lane or "-", outcome.lane.reason or "-") for outcome in outcomes)
    good = Counter((outcome.lane.lane or "-", outcome.lane.reason or "-") for outcome in outcomes if outcome.holds)
    for row, count in sorted(rows.items()):
        table.add_row(*row, str(count), str(good[row]))
    return table


def _allowed() -> Table:
    table = Table("difference", "allowed because", title="Differences that are allowed, and no others")
    for entry in ALLOWED:
        table.add_row(entry.what, entry.reason)
    for what, reason in UNSEEN:
        table.add_row(what, reason)
    return table


def compared(outcome: Outcome) -> str:
    """Say what of the answers was held against each other."""
    if outcome.plain.status >= 400:
        return f"status {outcome.plain.status} and bytes"
    if outcome.case.sampled:
        return "everything but drawn tokens"
    value = outcome.plain.value
    if isinstance(value, dict) and "shapes" in value:
        return "events, chunk shapes"
    return "the whole JSON"


def _reasons(outcome: Outcome) -> str:
    reasons = {d.allowed for d in outcome.differences if d.allowed and not d.path.startswith("header ")}
    names = [entry.what for entry in ALLOWED if entry.reason in reasons and entry.what not in ("id", "created")]
    return "allowed: " + ", ".join(names)
