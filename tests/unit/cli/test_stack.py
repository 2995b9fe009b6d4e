import socket
from itertools import islice
from pathlib import Path

import pytest

from cli import programs
from cli.ports import free_ports
from cli.programs import MissingProgramError
from cli.settings import LocalSettings
from cli.stack import MissingModelError, Stack
from process.errors import PortBusyError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


async def test_a_missing_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    settings = LocalSettings(ports="auto", state_dir=tmp_path)
    with pytest.raises(MissingModelError, match=r"no model in .*models/smollm2-135m-instruct: `anchorleg model`"):
        async with Stack(settings):
            pass
    assert not settings.logs.exists()


async def test_a_busy_port_is_refused_before_anything_starts(tmp_path: Path, model: Path) -> None:
    others = islice(free_ports(), 9)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = LocalSettings(
            state_dir=tmp_path,
            model_dir=model,
            public_port=taken.getsockname()[1],
            internal_port=next(others),
            admin_port=next(others),
            redis_port=next(others),
            vllm_port=next(others),
            extproc_port=next(others),
            extproc_metrics_port=next(others),
            decode_port=next(others),
            decode_metrics_port=next(others),
        )
        with pytest.raises(PortBusyError, match=r"envoy needs it .the clients' entrance.*--public-port PORT"):
            async with Stack(settings):
                pass
    assert not settings.logs.exists()


async def test_a_missing_program_is_refused_before_anything_starts(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "_in_package", lambda package, pattern: None)
    monkeypatch.setenv("PATH", "")
    settings = LocalSettings(ports="auto", state_dir=tmp_path, model_dir=model)
    with pytest.raises(MissingProgramError, match=r"the program [\w-]+ is not on this machine: .*anchorleg\[local\]"):
        async with Stack(settings):
            pass
    assert not settings.logs.exists()
