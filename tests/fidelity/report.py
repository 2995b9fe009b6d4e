"""What came of the cases, as tables: one row per case, one per lane and reason, one per allowed difference."""

from collections import Counter
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from tests.fidelity.allowed import ALLOWED, UNSEEN
from tests.fidelity.lanes import Outcome
from tests.fidelity.rounding import Gaps, Judgement
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


def show_judgement(judgement: Judgement, console: Console) -> bool:
    """Print how far tokens are behind vLLM's choices; returns whether that is as it should be."""
    table = Table(
        *("prompts", "answers of", "tokens", "vLLM's choice", "near ties", "furthest behind, nats"),
        title="Near ties where arithmetic rounds: each token read by plain vLLM",
    )
    kinds = list(dict.fromkeys(one.prompt.kind for one in judgement.answers))
    for kind in (*kinds, "all"):
        answers = [one for one in judgement.answers if kind in (one.prompt.kind, "all")]
        for whose, several in (("the lane", [one.lane for one in answers]), ("plain vLLM", [one.own for one in answers])):
            gaps = Gaps.joined(several)
            tokens = len(gaps.values)
            table.add_row(kind, whose, f"{tokens}", f"{tokens - gaps.ties}", f"{gaps.ties}", f"{gaps.worst:.4f}")
    console.print(table)
    noticed = sum(judgement.refuses(one.corrupted) for one in judgement.answers)
    console.print(
        f"allowed in the lane: {judgement.most_ties} near ties, {judgement.allowed:.4f} nats; speculation gave it "
        f"{judgement.drafted} tokens; {noticed} of {len(judgement.answers)} answers with one wrong token refused"
    )
    faults = judgement.faults()
    for fault in faults:
        console.print(fault, markup=False, highlight=False)
    return not faults


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
