import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from cli.compose import compose_services
from cli.flags import run_with_flags
from cli.ports import choose_ports
from cli.services import Service, stack_services
from cli.settings import LocalSettings
from cli.stack import child_environment
from decode_daemon.settings import DaemonSettings
from gateway.settings import GatewaySettings
from process.settings import ProcessSettings

ROOT = Path(__file__).parents[3]
SETTINGS = LocalSettings()
SERVICES = compose_services(SETTINGS)


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return content


def local(settings: LocalSettings = SETTINGS) -> dict[str, Service]:
    ports = choose_ports(settings)
    services = stack_services(settings, ports, model=Path("/m"), envoy_config=Path("/e.yaml"))
    return {service.name: service for service in services}


def flags(service: Service) -> dict[str, str]:
    return {name: value for name, value in pairwise(service.command) if name.startswith("--")}


@pytest.mark.parametrize("service", SERVICES, ids=lambda service: service.name)
def test_compose_runs_the_stacks_own_command_in_its_environment(compose: dict[str, Any], service: Service) -> None:
    described = compose["services"][service.name]
    assert tuple(described["command"]) == service.command
    environment = dict(described.get("environment", {}))
    if "ANCHORLEG_SECRET" in service.environment:
        assert environment.pop("ANCHORLEG_SECRET").startswith("${ANCHORLEG_SECRET:?")
    assert environment == {k: v for k, v in service.environment.items() if k != "ANCHORLEG_SECRET"}


@pytest.mark.parametrize("service", SERVICES, ids=lambda service: service.name)
def test_compose_checks_and_orders_as_the_stack_does(compose: dict[str, Any], service: Service) -> None:
    described = compose["services"][service.name]
    assert described["healthcheck"]["test"] == ["CMD", "anchorleg", "ready", *service.ready]
    needs = {name for name, how in described.get("depends_on", {}).items() if how["condition"] == "service_healthy"}
    assert needs == set(service.after)


def test_compose_has_nothing_but_the_stack_the_model_and_prometheus(compose: dict[str, Any]) -> None:
    assert compose["services"].keys() == {service.name for service in SERVICES} | {"model", "prometheus"}


def test_every_image_is_a_target_of_the_dockerfile(compose: dict[str, Any]) -> None:
    stages = re.findall(r"^FROM (\S+) AS (\w+)$", (text := (ROOT / "Dockerfile").read_text()), re.MULTILINE)
    steps = {base for base, _ in stages} | set(re.findall(r"^COPY --from=(\w+) ", text, re.MULTILINE))
    used = {described["build"]["target"] for described in compose["services"].values() if "build" in described}
    assert used == {target for _, target in stages} - steps


def test_only_the_clients_entrance_is_published_beyond_this_machine(compose: dict[str, Any]) -> None:
    published = [port for described in compose["services"].values() for port in described.get("ports", [])]
    assert [port for port in published if not port.startswith("127.0.0.1:")] == ["10000:10000"]


def test_prometheus_scrapes_every_process_that_has_metrics() -> None:
    jobs = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())["scrape_configs"]
    scraped = {
        f"http://{target}{job.get('metrics_path', '/metrics')}"
        for job in jobs
        for static in job["static_configs"]
        for target in static["targets"]
    }
    assert scraped == {url for service in SERVICES for url in service.metrics}


def test_on_one_machine_everything_listens_on_loopback_alone() -> None:
    for service in local().values():
        words = " ".join(service.command)
        assert "0.0.0.0" not in words
        assert all(urlsplit(check).hostname == "127.0.0.1" for check in service.ready)


def test_several_daemons_have_names_and_ports_of_their_own() -> None:
    services = local(SETTINGS.model_copy(update={"daemons": 2}))
    first, second = services["decode-0"], services["decode-1"]
    for flag in ("--decode-port", "--control-port", "--metrics-port"):
        assert flags(first)[flag] != flags(second)[flag]


def test_the_processes_agree_on_model_length_store_and_secret() -> None:
    services = local()
    vllm, decode, extproc = services["vllm"], services["decode"], services["extproc"]
    assert flags(vllm)["--model"] == flags(decode)["--model-dir"] == "/m"
    assert flags(vllm)["--max-model-len"] == flags(decode)["--context-tokens"]
    assert flags(vllm)["--dtype"] == flags(decode)["--dtype"]
    assert flags(decode)["--redis-url"] == flags(extproc)["--redis-url"]
    secrets = {service.environment["ANCHORLEG_SECRET"] for service in (vllm, decode, extproc)}
    assert len(secrets) == 1


def test_each_run_has_a_secret_of_its_own_that_no_command_line_shows() -> None:
    one, two = LocalSettings(), LocalSettings()
    assert one.signing_keys != two.signing_keys
    for service in local(one).values():
        assert one.secret.get_secret_value() not in " ".join(service.command)


def test_vllm_takes_eager_and_further_arguments() -> None:
    settings = SETTINGS.model_copy(update={"eager": True, "vllm_arg": ["--max-num-seqs", "8"]})
    vllm = local(settings)["vllm"]
    assert vllm.command[-3:] == ("--enforce-eager", "--max-num-seqs", "8")
    assert json.loads(flags(vllm)["--kv-transfer-config"])["kv_role"] == "kv_producer"


def test_children_read_the_same_configuration_file(tmp_path: Path) -> None:
    file = tmp_path / "anchorleg.toml"
    file.write_text("[gateway]\n")
    assert child_environment(LocalSettings.load(config=file))["ANCHORLEG_CONFIG"] == str(file)


@pytest.mark.parametrize(
    ("name", "settings"), [("extproc", GatewaySettings), ("decode", DaemonSettings)], ids=["extproc", "decode"]
)
def test_each_process_understands_the_flags_that_the_stack_gives_it(
    name: str, settings: type[ProcessSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = next(service for service in SERVICES if service.name == name)
    for variable, value in service.environment.items():
        monkeypatch.setenv(variable, value)
    seen: list[ProcessSettings] = []
    with pytest.raises(SystemExit, match="0"):
        run_with_flags(settings, lambda parsed: seen.append(parsed), service.command[2:], command=name, about="")
    assert seen[0].redis_url == "redis://redis:6379/0"
    assert seen[0].signing_keys == SETTINGS.signing_keys
