from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import Field

from process.errors import ConfigError
from process.settings import ProcessSettings

SECRET = "sixteen-or-more-characters"


class Lane(ProcessSettings):
    section: ClassVar[str] = "gateway"

    listen_port: int = Field(50051, ge=0, le=65535, description="Port of the gRPC server.")
    stops: list[str] = Field(default_factory=list)


@pytest.fixture(autouse=True)
def _only_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANCHORLEG_SECRET", SECRET)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "anchorleg.toml"
    path.write_text('redis_url = "redis://file:1"\n[gateway]\nlisten_port = 1\n[daemon]\nanything = 3\n')
    return path


def test_defaults_hold_when_no_source_says_otherwise() -> None:
    assert Lane.load().listen_port == 50051


def test_the_file_overrides_defaults_and_other_sections_are_left_alone(file: Path) -> None:
    settings = Lane.load(config=file)
    assert (settings.redis_url, settings.listen_port) == ("redis://file:1", 1)


def test_the_environment_overrides_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANCHORLEG_CONFIG", str(file))
    monkeypatch.setenv("ANCHORLEG_GATEWAY_LISTEN_PORT", "2")
    monkeypatch.setenv("ANCHORLEG_GATEWAY_STOPS", '["a", "b"]')
    settings = Lane.load()
    assert (settings.redis_url, settings.listen_port, settings.stops) == ("redis://file:1", 2, ["a", "b"])


def test_a_flag_overrides_all_and_none_is_no_flag(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANCHORLEG_GATEWAY_LISTEN_PORT", "2")
    settings = Lane.load(config=file, listen_port="3", redis_url=None)
    assert (settings.redis_url, settings.listen_port) == ("redis://file:1", 3)


@pytest.mark.parametrize(
    ("text", "named", "suggested"),
    [
        ("[gateway]\nlisten_prot = 1", "listen_prot in [gateway]", "listen_port"),
        ('redis_ulr = "x"', "redis_ulr", "redis_url"),
        ("[gatway]\nlisten_port = 1", "gatway", "gateway"),
        ("listen_port = 1", "listen_port", "known are"),
        ('config = "other.toml"', "config", "known are"),
    ],
)
def test_an_unknown_key_in_the_file_is_named_with_the_nearest(tmp_path: Path, text: str, named: str, suggested: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        Lane.load(config=path)
    assert f"{path}: unknown key {named}" in str(refused.value)
    assert suggested in str(refused.value)


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("ANCHORLEG_GATEWAY_LISTEN_PROT", "ANCHORLEG_GATEWAY_LISTEN_PORT"),
        ("ANCHORLEG_REDIS_ULR", "ANCHORLEG_REDIS_URL"),
        ("ANCHORLEG_LISTEN_PORT", "ANCHORLEG_GATEWAY_LISTEN_PORT"),
    ],
)
def test_an_unknown_variable_is_named_with_the_nearest(monkeypatch: pytest.MonkeyPatch, name: str, suggested: str) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=f"unknown environment variable {name}: did you mean .*{suggested}"):
        Lane.load()


def test_variables_of_other_sections_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANCHORLEG_DAEMON_ANYTHING", "1")
    Lane.load()


def test_a_bad_value_is_told_with_field_value_and_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("[gateway]\nlisten_port = 70000")
    with pytest.raises(ConfigError, match=r"listen_port = 70000 from the configuration file .*65535"):
        Lane.load(config=path)
    monkeypatch.setenv("ANCHORLEG_GATEWAY_LISTEN_PORT", "many")
    with pytest.raises(ConfigError, match="listen_port = 'many' from the environment variable ANCHORLEG_GATEWAY"):
        Lane.load(config=path)
    with pytest.raises(ConfigError, match="listen_port = '-1' from the flag --listen-port"):
        Lane.load(config=path, listen_port="-1")


def test_a_list_that_is_no_json_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANCHORLEG_GATEWAY_STOPS", "a,b")
    with pytest.raises(ConfigError, match="ANCHORLEG_GATEWAY_STOPS must be JSON"):
        Lane.load()


def test_a_missing_secret_says_where_to_give_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANCHORLEG_SECRET")
    with pytest.raises(ConfigError, match="secret is not set: give --secret or ANCHORLEG_SECRET"):
        Lane.load()


def test_a_short_secret_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANCHORLEG_SECRET", f"{SECRET},hunter2")
    with pytest.raises(ConfigError, match="at least 16 characters") as refused:
        Lane.load()
    assert "hunter2" not in str(refused.value)


def test_two_keys_are_both_known_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANCHORLEG_SECRET", f"new-{SECRET}, old-{SECRET}")
    settings = Lane.load()
    assert settings.signing_keys == (f"new-{SECRET}".encode(), f"old-{SECRET}".encode())
    assert SECRET not in repr(settings)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot read .*No such file"), (b"a = ", "not valid TOML"), (b"\xff", "not valid")],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "anchorleg.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as refused:
        Lane.load(config=path)
    assert str(path) in str(refused.value)
