"""Command-line flags that come from a settings class, so that no flag is written twice.

Every flag reaches the settings as text: the settings class alone knows types and limits, and its messages
name the flag. Settings classes are imported when their command runs, which keeps `anchorleg --help` quick.
"""

import inspect
import types
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import typer
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from process.settings import ProcessSettings, flag_name

S = TypeVar("S", bound=ProcessSettings)

# A command that hands all its arguments, --help too, to `run_with_flags`.
FORWARD = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def run_with_flags(
    settings: type[S],
    action: Callable[[S], int | None],
    arguments: Sequence[str],
    *,
    command: str,
    about: str,
) -> None:
    """Parse `arguments` into `settings` and run `action`; what it returns is the exit status.

    Raises:
        ConfigError: a setting is wrong.
        SystemExit: always otherwise, as command-line programs end.
    """

    def run(**flags: Any) -> None:
        raise typer.Exit(action(settings.load(**flags)) or 0)

    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in options(settings).items()
        ]
    )
    run.__annotations__ = dict(options(settings))
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(help=about)(run)
    app(args=list(arguments), prog_name=command)


def options(settings: type[ProcessSettings]) -> dict[str, Any]:
    """One optional parameter for each field: a switch, a repeatable flag, or a flag with one value."""
    return {name: _option(name, field) for name, field in settings.model_fields.items()}


def _option(name: str, field: FieldInfo) -> Any:
    kind = _without_none(field.annotation)
    flag = flag_name(name)
    about = _about(field)
    if kind is bool:
        return Annotated[bool | None, typer.Option(f"{flag}/--no-{flag[2:]}", help=about, show_default=False)]
    if get_origin(kind) in (list, tuple):
        metavar = _metavar(get_args(kind)[0])
        return Annotated[list[str] | None, typer.Option(flag, help=about, metavar=metavar, show_default=False)]
    return Annotated[str | None, typer.Option(flag, help=about, metavar=_metavar(kind), show_default=False)]


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
        return kinds[0] if len(kinds) == 1 else annotation
    return annotation


def _metavar(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    if kind is SecretStr:
        return "TEXT"
    return {"int": "INTEGER", "float": "NUMBER", "str": "TEXT"}.get(
        getattr(kind, "__name__", ""), getattr(kind, "__name__", "VALUE").upper()
    )


def _about(field: FieldInfo) -> str:
    text = field.description or ""
    if field.is_required() or field.default_factory is not None or field.default in (None, False):
        return text
    return f"{text} (default: {field.default})".strip()
