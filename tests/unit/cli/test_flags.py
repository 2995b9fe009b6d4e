from pathlib import Path
from typing import ClassVar, Literal

import pytest
from pydantic import Field

from cli.flags import run_with_flags
from process.errors import ConfigError
from process.settings import ProcessSettings


class Daemon(ProcessSettings):
    section: ClassVar[str] = "daemon"

    model_dir: Path = Field(description="Folder of the model.")
    decode_port: int = Field(50061, description="Port of the token streams.")
    dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="Type of the weights.")
    eager: bool = Field(False, description="No compilation.")
    threads: int | None = Field(None, description="CPU threads.")
    extra: list[str] = Field(default_factory=list, description="More arguments.")


@pytest.fixture(autouse=True)
def _a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANCHORLEG_SECRET", "sixteen-or-more-characters")


def run(*arguments: str, status: int | None = None) -> tuple[Daemon | None, int | str | None]:
    seen: list[Daemon] = []

    def action(settings: Daemon) -> int | None:
        seen.append(settings)
        return status

    with pytest.raises(SystemExit) as ended:
        run_with_flags(Daemon, action, arguments, command="anchorleg decode", about="Run one decode daemon.")
    return (seen[0] if seen else None), ended.value.code


def test_every_field_is_a_flag_of_its_own_kind() -> None:
    settings, status = run(
        *("--model-dir", "/m", "--decode-port", "7", "--dtype", "float32", "--eager"),
        *("--threads", "2", "--extra", "a", "--extra", "--b"),
    )
    assert settings is not None
    assert status == 0
    assert (settings.model_dir, settings.decode_port, settings.dtype) == (Path("/m"), 7, "float32")
    assert (settings.eager, settings.threads, settings.extra) == (True, 2, ["a", "--b"])


def test_flags_that_are_not_given_leave_the_environment_and_the_defaults_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ANCHORLEG_DAEMON_DECODE_PORT", "8")
    monkeypatch.setenv("ANCHORLEG_DAEMON_EAGER", "1")
    monkeypatch.setenv("ANCHORLEG_DAEMON_EXTRA", '["c"]')
    settings, _ = run("--model-dir", "/m")
    assert settings is not None
    assert (settings.decode_port, settings.eager, settings.extra, settings.threads) == (8, True, ["c"], None)


def test_a_switch_can_be_turned_off_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANCHORLEG_DAEMON_EAGER", "1")
    settings, _ = run("--model-dir", "/m", "--no-eager")
    assert settings is not None
    assert settings.eager is False


def test_the_exit_status_is_what_the_action_returned() -> None:
    assert run("--model-dir", "/m", status=3)[1] == 3


def test_help_shows_flags_types_defaults_and_descriptions(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    settings, status = run("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert (settings, status) == (None, 0)
    for piece in (
        "Run one decode daemon.",
        "--decode-port INTEGER",
        "(default: 50061)",
        "bfloat16|float32",
        "--no-eager",
        "Folder of the model.",
        "--redis-url",
    ):
        assert piece in text


def test_an_unknown_flag_is_refused_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--decode-prot", "1")[1] == 2
    assert "--decode-prot" in capsys.readouterr().err


def test_a_value_that_does_not_fit_is_told_by_flag() -> None:
    with pytest.raises(ConfigError, match="decode_port = 'many' from the flag --decode-port"):
        run_with_flags(Daemon, lambda _: None, ["--model-dir", "/m", "--decode-port", "many"], command="x", about="")
