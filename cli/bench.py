"""`anchorleg bench`: each benchmark runs all that it compares in one go, prints units, and checks itself against its goals."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Measure, and hold the figures against benchmarks/goals.toml.", no_args_is_help=True)

JsonFile = Annotated[Path | None, typer.Option("--json", help="File to write the measures to, as JSON.")]
Check = Annotated[bool, typer.Option("--check", help="Exit with status 1 when a goal is missed.")]


@app.callback()
def bench() -> None:
    """Measure, and hold the figures against benchmarks/goals.toml."""


@app.command()
def overhead(
    json_file: JsonFile = None,
    check: Check = False,
    requests: Annotated[int, typer.Option(min=10, help="Requests for each median.")] = 200,
    seconds: Annotated[float, typer.Option(min=0.5, help="How long the rate is measured.")] = 5.0,
) -> None:
    """What the gateway costs, against a scripted vLLM and a scripted daemon."""
    from rich.console import Console

    from benchmarks.overhead import measure
    from benchmarks.report import report

    measures = asyncio.run(measure(requests=requests, seconds=seconds))
    raise typer.Exit(report("overhead", measures, json_file=json_file, check=check, console=Console()))
