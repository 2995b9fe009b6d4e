"""The rendered configuration is one that Envoy itself accepts, and says what the design says."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.compose import PLACES
from cli.envoy import EnvoyConfig, render
from cli.ports import choose_ports
from cli.programs import find_program
from cli.services import Places, envoy_config
from cli.settings import LocalSettings

SECRET = "a secret of the configuration test"


def rendered(places: Places, **settings: Any) -> str:
    local = LocalSettings.load(secret=SECRET, **settings)
    return envoy_config(local, choose_ports(local), places)


def several_vllms() -> str:
    return render(
        EnvoyConfig(
            public_host="0.0.0.0",
            public_port=10000,
            internal_host="127.0.0.1",
            internal_port=10001,
            admin_host="127.0.0.1",
            admin_port=9901,
            vllm=["10.0.0.1:8000", "10.0.0.2:8000"],
            extproc="gateway.internal:50051",
        )
    )


def listener(config: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(item for item in config["static_resources"]["listeners"] if item["name"] == name)
    return found


def manager(config: dict[str, Any], name: str) -> dict[str, Any]:
    typed: dict[str, Any] = listener(config, name)["filter_chains"][0]["filters"][0]["typed_config"]
    return typed


@pytest.mark.parametrize("text", [rendered(Places()), rendered(PLACES), several_vllms()], ids=["local", "compose", "several"])
def test_envoy_accepts_it(text: str, tmp_path: Path) -> None:
    path = tmp_path / "envoy.yaml"
    path.write_text(text)
    checked = subprocess.run(
        [*find_program("envoy"), "--mode", "validate", "-c", str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert checked.returncode == 0, checked.stderr[-2000:]


def test_only_the_route_with_the_header_reaches_ext_proc() -> None:
    slo, plain = manager(yaml.safe_load(rendered(Places())), "public")["route_config"]["virtual_hosts"][0]["routes"]
    assert slo["match"]["headers"] == [{"name": "x-slo-class", "present_match": True}]
    assert set(slo["typed_per_filter_config"]) == {"envoy.filters.http.ext_proc", "envoy.filters.http.lua"}
    assert "typed_per_filter_config" not in plain
    lua, ext_proc, _ = manager(yaml.safe_load(rendered(Places())), "public")["http_filters"]
    assert lua["disabled"]
    assert ext_proc["disabled"]


def test_no_route_cuts_a_long_stream_and_admin_is_on_loopback() -> None:
    for places in (Places(), PLACES):
        config = yaml.safe_load(rendered(places))
        assert config["admin"]["address"]["socket_address"]["address"] == "127.0.0.1"
        for name in ("public", "internal"):
            for route in manager(config, name)["route_config"]["virtual_hosts"][0]["routes"]:
                assert route["route"]["timeout"] == "0s"


def test_the_longest_body_is_a_setting() -> None:
    config = yaml.safe_load(rendered(Places(), buffer_limit_bytes=5 << 20))
    assert listener(config, "public")["per_connection_buffer_limit_bytes"] == 5 << 20
