"""`anchorleg bench NAME`: each measure as one sub-command that runs everything it compares."""

import typer

app = typer.Typer(help="Measure the lane beside plain vLLM.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure the lane beside plain vLLM."""
