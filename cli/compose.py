"""The addresses of docker-compose.yml: each process in a container of its own, known by its service's name."""

from pathlib import Path

from cli.ports import choose_ports
from cli.services import Place, Places, Service, stack_services
from cli.settings import MODEL_NAME, LocalSettings

ANY = "0.0.0.0"
PLACES = Places(
    redis=Place(ANY, "redis"),
    vllm=Place(ANY, "vllm"),
    extproc=Place(ANY, "extproc"),
    envoy=Place(ANY, "envoy"),
    decode=(Place(ANY, "decode"),),
)
MODEL = Path("/models") / MODEL_NAME
ENVOY_CONFIG = Path("/etc/anchorleg/envoy.yaml")


def compose_services(settings: LocalSettings) -> tuple[Service, ...]:
    """What docker-compose.yml must contain, one service for each."""
    return stack_services(settings, choose_ports(settings), model=MODEL, envoy_config=ENVOY_CONFIG, places=PLACES)
