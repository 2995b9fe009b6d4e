"""Measures: printed with units, written as JSON, held against goals.toml."""

import json
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure. `name` is its key in goals.toml; the detail says how it was taken, or what it is compared with."""

    name: str
    value: float
    unit: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Goal:
    """What a measure has to reach."""

    what: str
    at_most: float | None = None
    at_least: float | None = None

    def met(self, value: float) -> bool:
        """Whether a value reaches it."""
        return (self.at_most is None or value <= self.at_most) and (self.at_least is None or value >= self.at_least)

    def __str__(self) -> str:
        return f"≤ {self.at_most:g}" if self.at_most is not None else f"≥ {self.at_least:g}"


def goals(bench: str) -> dict[str, Goal]:
    """Return a benchmark's goals by measure."""
    table = tomllib.loads(files("benchmarks").joinpath("goals.toml").read_text())
    return {name: Goal(**fields) for name, fields in table.get(bench, {}).items()}


def report(bench: str, measures: Sequence[Measure], *, json_file: Path | None, check: bool, console: Console) -> int:
    """Print and write the measures; returns the exit status: 1 when `check` and a goal is missed or has no measure."""
    wanted = goals(bench)
    table = Table(title=f"anchorleg bench {bench}")
    for column in ("measure", "value", "goal", "how"):
        table.add_column(column, justify="right" if column == "value" else "left", no_wrap=column != "how")
    missed: list[str] = [f"{name} was not measured" for name in wanted.keys() - {m.name for m in measures}]
    for measure in measures:
        goal = wanted.get(measure.name)
        verdict = ""
        if goal is not None:
            verdict = f"{goal} {'met' if goal.met(measure.value) else 'MISSED'}"
            if not goal.met(measure.value):
                missed.append(f"{measure.name} is {measure.value:.4g} {measure.unit}, the goal is {goal} ({goal.what})")
        table.add_row(measure.name, f"{_digits(measure.value)} {measure.unit}", verdict, measure.detail)
    console.print(table)
    if json_file is not None:
        written = {m.name: {**asdict(m), "goal": asdict(wanted[m.name]) if m.name in wanted else None} for m in measures}
        json_file.write_text(json.dumps({"bench": bench, "measures": written}, indent=2, ensure_ascii=False) + "\n")
    for line in missed:
        console.print(f"missed: {line}")
    return 1 if check and missed else 0


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.4g}"
