"""`anchorleg fields`: which request fields the lane serves, as a table for the terminal, or as Markdown for a page."""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from gateway.endpoints import Endpoint
from gateway.fields import FIELDS, Leg

HEADINGS = ("field", "chat completions", "completions")

_WORDS = {
    Leg.PREFILL: "vLLM reads it, as it came",
    Leg.DECODE: "after the first token",
    Leg.BOTH: "both legs",
    Leg.NEITHER: "only a value without effect",
    Leg.PLAIN: "plain vLLM",
    None: "-",
}


def rows() -> Iterator[tuple[str, str, str]]:
    """Yield each field with the leg it belongs to on each endpoint, in alphabetical order; "-" where there is no such field."""
    for name in sorted(FIELDS[Endpoint.CHAT].keys() | FIELDS[Endpoint.COMPLETIONS].keys()):
        yield name, _words(Endpoint.CHAT, name), _words(Endpoint.COMPLETIONS, name)


def _words(endpoint: Endpoint, name: str) -> str:
    row = FIELDS[endpoint].get(name)
    return _WORDS[None if row is None else row.leg]


def show(console: Console) -> None:
    """Print the table for people."""
    table = Table(*HEADINGS)
    for row in rows():
        table.add_row(*row)
    console.print(table)


def markdown() -> str:
    """Return the table as Markdown."""
    lines = [HEADINGS, ("---",) * len(HEADINGS), *((f"`{name}`", *words) for name, *words in rows())]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
