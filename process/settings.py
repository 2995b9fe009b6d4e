"""Typed settings of one process: flags, then `ANCHORLEG_*` environment, then one TOML file, then defaults.

Fields of `ProcessSettings` are common to all processes: `ANCHORLEG_REDIS_URL`, and `redis_url` at the top of
the file. Fields that a subclass adds are those of its section: `ANCHORLEG_GATEWAY_LISTEN_PORT`, `listen_port`
in `[gateway]`. One file and one environment may serve several processes: what belongs to another section is
left to that process. Any other name is an error: a mistyped name, ignored, is a setting that does not hold.
"""

import difflib
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from process.errors import ConfigError

PREFIX = "ANCHORLEG_"
SECTIONS = ("gateway", "daemon", "connector", "local")
MIN_SECRET_CHARS = 16


class ProcessSettings(BaseSettings):
    """The settings common to all processes; a subclass names its `section` and adds the fields of it."""

    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, case_sensitive=True, env_ignore_empty=True, hide_input_in_errors=True
    )
    section: ClassVar[str]

    config: Path | None = Field(default=None, description="One TOML file with settings.")
    secret: SecretStr = Field(
        description="Key that signs claims, shared by gateways, connectors and daemons. While a key is being "
        "changed: NEW,OLD. The first signs, all verify. Better given by environment than by flag."
    )
    redis_url: str = Field(
        default="redis://127.0.0.1:6379/0",
        description="The Redis that holds the lease table.",
        repr=False,  # it may hold a password
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Least severe level shown.")
    log_format: Literal["console", "json"] | None = Field(
        default=None, description="How log lines look; by default console on a terminal and json elsewhere."
    )

    @field_validator("secret")
    @classmethod
    def _each_key_is_long_enough(cls, secret: SecretStr) -> SecretStr:
        short = [key for key in _keys(secret) if len(key) < MIN_SECRET_CHARS]
        if short:
            raise ValueError(f"every key must have at least {MIN_SECRET_CHARS} characters")
        return secret

    @property
    def signing_keys(self) -> tuple[bytes, ...]:
        """The keys of `secret`, UTF-8: the first signs, every one verifies."""
        return tuple(key.encode() for key in _keys(self.secret))

    @classmethod
    def load(cls, *, config: Path | None = None, **flags: Any) -> Self:
        """Settings from all sources; a flag that is None was not given.

        Raises:
            ConfigError: a name is unknown, a value is missing or does not fit, or the file cannot be read.
        """
        given = {name: value for name, value in {"config": config, **flags}.items() if value is not None}
        if unknown := sorted(given.keys() - cls.model_fields.keys()):
            raise ConfigError(f"unknown flag {flag_name(unknown[0])}: {_nearest(unknown[0], cls.model_fields)}")
        try:
            return cls(**given)
        except ValidationError as error:
            raise ConfigError(_describe(cls, error, given)) from None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags over environment over file, and nothing else."""
        return init_settings, _Environment(settings_cls), _File(settings_cls)

    @classmethod
    def own_fields(cls) -> frozenset[str]:
        """Names of the fields of this section, without the common ones."""
        return frozenset(cls.model_fields) - frozenset(ProcessSettings.model_fields)


def flag_name(field: str) -> str:
    """`listen_port` as a user types it: `--listen-port`."""
    return "--" + field.replace("_", "-")


def variable_name(settings: type[ProcessSettings], field: str) -> str:
    """The environment variable of one field."""
    section = f"{settings.section}_" if field in settings.own_fields() else ""
    return f"{PREFIX}{section}{field}".upper()


class _Environment(EnvSettingsSource):
    """`ANCHORLEG_<FIELD>` for common fields, `ANCHORLEG_<SECTION>_<FIELD>` for those of the section."""

    settings_cls: type[ProcessSettings]

    def __call__(self) -> dict[str, Any]:
        known = {variable_name(self.settings_cls, field) for field in self.settings_cls.model_fields}
        others = tuple(f"{PREFIX}{s}_".upper() for s in SECTIONS if s != self.settings_cls.section)
        for name in sorted(self.env_vars):
            if name.startswith(PREFIX) and name not in known and not name.startswith(others):
                raise ConfigError(f"unknown environment variable {name}: {_nearest(name, known)}")
        return super().__call__()

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self.env_vars.get(variable_name(self.settings_cls, field_name)), field_name, False

    def prepare_field_value(self, field_name: str, field: FieldInfo, value: Any, value_is_complex: bool) -> Any:
        try:
            return super().prepare_field_value(field_name, field, value, value_is_complex)
        except ValueError:
            name = variable_name(self.settings_cls, field_name)
            raise ConfigError(f'{name} must be JSON, such as ["a", "b"], but is {value!r}') from None


class _File(PydanticBaseSettingsSource):
    """The TOML file that `config` names: common keys at its top, one table for each section."""

    settings_cls: type[ProcessSettings]

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return None, field_name, False  # the whole file is read at once, in __call__

    def __call__(self) -> dict[str, Any]:
        named = self.current_state.get("config")
        return read_file(self.settings_cls, Path(named)) if named else {}


def read_file(settings: type[ProcessSettings], path: Path) -> dict[str, Any]:
    """The fields of one process that the file sets, by field name.

    Raises:
        ConfigError: the file cannot be read, is no TOML, or has a key neither common nor of this section.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {path} is not valid TOML: {error}") from None
    tables = {name: content.pop(name, {}) for name in SECTIONS}
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {name} must be a table, [{name}], but is {table!r}")
    common = settings.model_fields.keys() - settings.own_fields() - {"config"}
    own = tables[settings.section]
    if unknown := sorted(content.keys() - common):
        raise ConfigError(f"{path}: unknown key {unknown[0]}: {_nearest(unknown[0], [*common, *SECTIONS])}")
    if unknown := sorted(own.keys() - settings.own_fields()):
        nearest = _nearest(unknown[0], settings.own_fields())
        raise ConfigError(f"{path}: unknown key {unknown[0]} in [{settings.section}]: {nearest}")
    return {**content, **own}


def _keys(secret: SecretStr) -> list[str]:
    return [key.strip() for key in secret.get_secret_value().split(",")]


def _nearest(name: str, valid: Iterable[str]) -> str:
    valid = sorted(valid)
    close = difflib.get_close_matches(name, valid, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(valid)}"


def _describe(settings: type[ProcessSettings], error: ValidationError, flags: dict[str, Any]) -> str:
    lines = []
    environment = _Environment(settings).env_vars
    for problem in error.errors(include_url=False, include_context=False):
        field = str(problem["loc"][0]) if problem["loc"] else ""
        variable = variable_name(settings, field)
        where = "the configuration file"
        if field in flags:
            where = f"the flag {flag_name(field)}"
        elif variable in environment:
            where = f"the environment variable {variable}"
        elif problem["type"] == "missing":
            lines.append(f"{field} is not set: give {flag_name(field)} or {variable}, or {field} in the file")
            continue
        known = settings.model_fields.get(field)
        secret = known is not None and (known.annotation is SecretStr or not known.repr)
        shown = "(not shown)" if secret else repr(problem["input"])
        lines.append(f"{field} = {shown} from {where} does not fit: {problem['msg']}")
    return "\n".join(lines)
