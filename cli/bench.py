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


@app.command()
def leases(
    json_file: JsonFile = None,
    check: Check = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each figure is their median.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.05, help="How long one thing is measured in a round.")] = 1.0,
    redis_url: Annotated[str | None, typer.Option(help="A server without leases, instead of one started for this.")] = None,
) -> None:
    """What a lease costs at 10, 1,000 and 10,000 slots, beside a bare INCR on the same server: half a minute a round."""
    import uvloop
    from redis.exceptions import RedisError
    from rich.console import Console

    from benchmarks.leases import measure
    from benchmarks.report import report
    from leases import LeasesUnavailable
    from process.errors import ProcessError

    try:
        # The loop that gateways and daemons run on.
        measures = uvloop.run(measure(redis_url=redis_url, rounds=rounds, seconds=seconds))
    except (ProcessError, LeasesUnavailable, RedisError) as error:
        typer.echo(f"anchorleg: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(report("leases", measures, json_file=json_file, check=check, console=Console()))
