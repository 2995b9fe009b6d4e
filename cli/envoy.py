"""Envoy's configuration, from its one template."""

import sys
from dataclasses import dataclass
from pathlib import Path

import jinja2

_MIN_BUFFER_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Address:
    """A host name or IP address, and a port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Read "host:port"; raises ValueError."""
        host, _, port = text.rpartition(":")
        if not host or not port.isdigit() or not 1 <= int(port) <= 65535:
            raise ValueError(f"{text!r} is no host:port")
        return cls(host.strip("[]"), int(port))


@dataclass(frozen=True, slots=True)
class EnvoyConfig:
    """What differs between one machine and another; the rest is the template's."""

    public_host: str
    public_port: int
    internal_host: str
    internal_port: int
    admin_host: str
    admin_port: int
    vllm: list[str]  # "host:port" of each instance
    extproc: str  # "host:port"
    buffer_limit_bytes: int = 64 << 20  # longest request body
    idle_timeout_s: int = 3600  # longest silence on a stream
    message_timeout_s: int = 10  # longest decision of the gateway; then requests go on without it
    max_message_timeout_s: int = 3600  # longest non-streaming answer

    def __post_init__(self) -> None:
        if not self.vllm:
            raise ValueError("Envoy needs at least one vLLM instance")
        if self.buffer_limit_bytes < _MIN_BUFFER_BYTES:
            raise ValueError(f"buffer_limit_bytes is {self.buffer_limit_bytes}; below {_MIN_BUFFER_BYTES} nothing works")

    @property
    def vllm_addresses(self) -> list[Address]:
        """The instances, parsed."""
        return [Address.parse(text) for text in self.vllm]

    @property
    def extproc_address(self) -> Address:
        """The gateway, parsed."""
        return Address.parse(self.extproc)


def render(config: EnvoyConfig) -> str:
    """Return Envoy's configuration, YAML; raises ValueError for an address that is none."""
    folder = template_folder()
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder), undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    guard = (folder / "guard.lua").read_text(encoding="utf-8").rstrip()
    return environment.get_template("envoy.yaml.j2").render(config=config, guard=guard)


def template_folder() -> Path:
    """The template's folder: beside the code in a checkout, under the prefix where the distribution is installed."""
    candidates = (Path(__file__).parents[1] / "envoy", Path(sys.prefix) / "share" / "anchorleg" / "envoy")
    for folder in candidates:
        if (folder / "envoy.yaml.j2").is_file():
            return folder
    raise FileNotFoundError(f"envoy.yaml.j2 is in none of {', '.join(map(str, candidates))}: reinstall anchorleg")
