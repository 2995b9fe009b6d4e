"""`anchorleg bench`: each benchmark runs all that it compares in one go, prints units, and checks itself against its goals."""

import asyncio
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

if TYPE_CHECKING:
    from benchmarks.handoff import Part
    from handoff.transports import TransportName

app = typer.Typer(help="Measure, and hold the figures against benchmarks/goals.toml.", no_args_is_help=True)

JsonFile = Annotated[Path | None, typer.Option("--json", help="File to write the measures to, as JSON.")]
Check = Annotated[bool, typer.Option("--check", help="Exit with status 1 when a goal is missed.")]


class TransportChoice(StrEnum):
    """How KV is written; a list of literals is no option that typer takes."""

    NIXL = "nixl"
    MOONCAKE = "mooncake"


class HandoffPart(StrEnum):
    """What `bench handoff` measures."""

    WIRE = "wire"
    GAP = "gap"
    PREFILL = "prefill"


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


@app.command()
def handoff(
    json_file: JsonFile = None,
    check: Check = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each figure is their median.")] = 15,
    transport: Annotated[
        list[TransportChoice] | None,
        typer.Option(help="May be repeated; the first carries gap and prefill. By default each that is installed."),
    ] = None,
    part: Annotated[
        list[HandoffPart] | None,
        typer.Option(help="May be repeated. wire: against a raw write. gap: token 1 to token 2. prefill: throughput, memory."),
    ] = None,
    model_dir: Annotated[Path | None, typer.Option(help="Hugging Face folder of SmolLM2 for gap and prefill.")] = None,
    eager: Annotated[bool, typer.Option(help="Start vLLM with --enforce-eager: ready sooner, slower prefill.")] = False,
) -> None:
    """What the handoff costs on the wire, between token 1 and token 2, and in vLLM's prefill: ten minutes."""
    from rich.console import Console

    from benchmarks.handoff import measure
    from benchmarks.report import report
    from cli.settings import LocalSettings
    from handoff.transport import TransportError
    from process.errors import ProcessError

    try:
        settings = LocalSettings.load(ports="auto", model_dir=model_dir, eager=eager)
        chosen = cast("list[TransportName]", [choice.value for choice in transport or ()])
        parts = cast("list[Part]", [choice.value for choice in part or HandoffPart])
        measures = asyncio.run(measure(settings, transports=chosen, parts=parts, rounds=rounds))
    except (ProcessError, TransportError) as error:
        typer.echo(f"anchorleg: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(report("handoff", measures, json_file=json_file, check=check, console=Console()))


@app.command()
def engine(
    json_file: JsonFile = None,
    check: Check = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each figure is their median.")] = 5,
    stack: Annotated[bool, typer.Option(help="Measure beside vLLM, and the lane against it, on a stack of its own.")] = True,
    picture: Annotated[Path | None, typer.Option(help="File to draw the figures to, as SVG.")] = None,
    model_dir: Annotated[Path | None, typer.Option(help="Hugging Face folder of the model; SmolLM2 by default.")] = None,
) -> None:
    """What one user gets: a step's share of the memory's speed, speculation, and the lane against plain vLLM: six minutes."""
    from rich.console import Console

    from benchmarks.engine import measure as alone
    from benchmarks.lanes import measure as beside_vllm
    from benchmarks.picture import draw
    from benchmarks.report import report
    from cli.settings import LocalSettings
    from decode_daemon.engine.protocol import EngineError
    from process.errors import ProcessError

    try:
        settings = LocalSettings.load(ports="auto", model_dir=model_dir)
        measures = asyncio.run(beside_vllm(settings, rounds=rounds)) if stack else alone(settings.model, rounds=rounds)
    except (ProcessError, EngineError, FileNotFoundError) as error:
        typer.echo(f"anchorleg: {error}", err=True)
        raise typer.Exit(2) from None
    if picture is not None:
        draw(measures, picture)
    raise typer.Exit(report("engine", measures, json_file=json_file, check=check, console=Console()))
