import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "vllm", "transformers", "grpc", "nixl", "redis", "httpx", "zmq", "numpy", "jinja2")


def anchorleg(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cli.main", *arguments],
        env={**os.environ, "COLUMNS": "200", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_help_names_the_commands_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['anchorleg', '--help']\n"
        "from cli.main import app\n"
        "try: app()\n"
        f"finally: print('heavy:', sorted(set(sys.modules) & set({HEAVY!r})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "heavy: []" in done.stdout
    for command in ("up", "demo", "extproc", "decode", "envoy", "model", "bench"):
        assert f" {command} " in done.stdout


@pytest.mark.parametrize("command", ["up", "demo"])
def test_the_stacks_flags_are_those_of_its_settings(command: str) -> None:
    done = anchorleg(command, "--help")
    assert done.returncode == 0
    assert "--vllm-arg" in done.stdout
    assert "--public-port" in done.stdout


def test_a_refusal_is_one_line_and_status_2(tmp_path: Path) -> None:
    done = anchorleg("up", "--ports", "auto", "--state-dir", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith("anchorleg: there is no model in ")
    assert "Traceback" not in done.stderr


def test_an_unknown_variable_is_refused_with_status_2() -> None:
    done = anchorleg("up", ANCHORLEG_LOCAL_DEAMONS="2")
    assert done.returncode == 2
    assert "ANCHORLEG_LOCAL_DEAMONS: did you mean ANCHORLEG_LOCAL_DAEMONS" in done.stderr


def test_ready_succeeds_only_when_every_check_passes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        open_port = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        assert anchorleg("ready", open_port).returncode == 0
    done = anchorleg("ready", open_port)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"{open_port}: ")
