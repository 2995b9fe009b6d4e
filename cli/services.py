"""The stack, written down once: which processes there are, with which commands, in which environment.

`anchorleg up` starts these commands on one machine; docker-compose.yml has the same with other addresses.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cli.ports import Ports, PortUse
from cli.settings import LocalSettings


@dataclass(frozen=True)
class Place:
    """Where a process runs: the address it listens on, and the host by which the others reach it."""

    listen: str = "127.0.0.1"
    host: str = "127.0.0.1"


@dataclass(frozen=True)
class Places:
    """One place for each role; by default all are on this machine, reachable only from it."""

    redis: Place = Place()
    vllm: Place = Place()
    extproc: Place = Place()
    envoy: Place = Place()
    decode: tuple[Place, ...] = ()

    def daemon(self, index: int) -> Place:
        """Where decode daemon `index` runs."""
        return self.decode[index] if self.decode else Place()


@dataclass(frozen=True)
class Service:
    """One process: its command, what it adds to the environment, and how to tell that it is ready.

    The command's first word names a program (`anchorleg`, `python`, `valkey-server`, `envoy`) that is found
    where the command is started. `ready` holds checks of `cli.ready`, all of which must pass. It is started
    when every service in `after` is ready. `metrics` holds the URLs of its Prometheus metrics.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    ready: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    ports: tuple[PortUse, ...] = ()
    metrics: tuple[str, ...] = ()


def stack_services(
    settings: LocalSettings, ports: Ports, *, model: Path, envoy_config: Path, places: Places = Places()
) -> tuple[Service, ...]:
    """Every process of the stack, in the order in which they are shown; they stop in the reverse order."""
    daemons = [decode(settings, ports, index, model=model, places=places) for index in range(settings.daemons)]
    return (
        redis(ports, places),
        vllm(settings, ports, model=model, places=places),
        *daemons,
        extproc(settings, ports, places),
        envoy(ports, places, envoy_config),
    )


def redis(ports: Ports, places: Places) -> Service:
    """The lease table's store: nothing on disk, because daemons register again within seconds."""
    at = places.redis
    return Service(
        name="redis",
        command=(
            "valkey-server",
            *("--bind", at.listen, "--port", str(ports.redis)),
            *("--save", "", "--appendonly", "no", "--protected-mode", "no"),
        ),
        ready=(f"redis://{at.host}:{ports.redis}",),
        ports=(PortUse(ports.redis, "redis", "the lease table", "--redis-port"),),
    )


def vllm(settings: LocalSettings, ports: Ports, *, model: Path, places: Places) -> Service:
    """Stock vLLM with the connector loaded through its public option."""
    at = places.vllm
    transfer = {
        "kv_connector": "AnchorlegConnector",
        "kv_connector_module_path": "connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"metrics_host": at.listen, "metrics_port": ports.connector_metrics},
    }
    return Service(
        name="vllm",
        command=(
            *("python", "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model), "--served-model-name", settings.served_model_name),
            *("--dtype", settings.dtype, "--max-model-len", str(settings.context_tokens)),
            *("--host", at.listen, "--port", str(ports.vllm)),
            *("--kv-transfer-config", json.dumps(transfer)),
            *(("--enforce-eager",) if settings.eager else ()),
            *settings.vllm_arg,
        ),
        environment={
            **_secret(settings),
            "VLLM_CPU_KVCACHE_SPACE": str(settings.vllm_cache_gib),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        },
        ready=(f"http://{at.host}:{ports.vllm}/health",),
        ports=(
            PortUse(ports.vllm, "vllm", "its API", "--vllm-port"),
            PortUse(ports.connector_metrics, "vllm", "its connector's metrics", "--connector-metrics-port"),
        ),
        metrics=(f"http://{at.host}:{ports.vllm}/metrics", f"http://{at.host}:{ports.connector_metrics}/metrics"),
    )


def decode(settings: LocalSettings, ports: Ports, index: int, *, model: Path, places: Places) -> Service:
    """One decode daemon."""
    at = places.daemon(index)
    name = "decode" if settings.daemons == 1 else f"decode-{index}"
    stream, control, metrics = ports.decode[index], ports.control[index], ports.decode_metrics[index]
    return Service(
        name=name,
        command=(
            *("anchorleg", "decode"),
            *("--model-dir", str(model), "--served-model-name", settings.served_model_name),
            *("--dtype", settings.dtype, "--context-tokens", str(settings.context_tokens)),
            *("--host", at.listen, "--advertise-host", at.host),
            *("--decode-port", str(stream), "--control-port", str(control)),
            *("--metrics-host", at.listen, "--metrics-port", str(metrics)),
            *("--redis-url", _redis_url(ports, places)),
        ),
        environment=_common(settings),
        ready=(f"http://{at.host}:{metrics}/metrics", f"tcp://{at.host}:{stream}"),
        after=("redis",),
        ports=(
            PortUse(stream, name, "its token streams", "--decode-port"),
            PortUse(control, name, "its control socket", "--decode-port"),
            PortUse(metrics, name, "its metrics", "--decode-metrics-port"),
        ),
        metrics=(f"http://{at.host}:{metrics}/metrics",),
    )


def extproc(settings: LocalSettings, ports: Ports, places: Places) -> Service:
    """The gateway behind Envoy's ext_proc filter."""
    at = places.extproc
    return Service(
        name="extproc",
        command=(
            *("anchorleg", "extproc"),
            *("--listen-host", at.listen, "--listen-port", str(ports.extproc)),
            *("--metrics-host", at.listen, "--metrics-port", str(ports.extproc_metrics)),
            *("--upstream-url", f"http://{places.envoy.host}:{ports.internal}"),
            *("--redis-url", _redis_url(ports, places)),
        ),
        environment=_common(settings),
        ready=(f"http://{at.host}:{ports.extproc_metrics}/metrics", f"tcp://{at.host}:{ports.extproc}"),
        after=("redis",),
        ports=(
            PortUse(ports.extproc, "extproc", "its gRPC server", "--extproc-port"),
            PortUse(ports.extproc_metrics, "extproc", "its metrics", "--extproc-metrics-port"),
        ),
        metrics=(f"http://{at.host}:{ports.extproc_metrics}/metrics",),
    )


def envoy(ports: Ports, places: Places, config: Path) -> Service:
    """Envoy. It starts when vLLM is ready, so that its first health check of vLLM already passes."""
    at = places.envoy
    return Service(
        name="envoy",
        # Hot restart would share memory between all Envoys of this machine.
        command=("envoy", "-c", str(config), "--disable-hot-restart", "--log-level", "warning"),
        # Admin stays on loopback wherever Envoy runs.
        ready=(f"http://127.0.0.1:{ports.admin}/ready", f"http://{at.host}:{ports.public}/health"),
        after=("vllm", "extproc"),
        ports=(
            PortUse(ports.public, "envoy", "the clients' entrance", "--public-port"),
            PortUse(ports.internal, "envoy", "the gateway's calls to vLLM", "--internal-port"),
            PortUse(ports.admin, "envoy", "its admin interface", "--admin-port"),
        ),
        metrics=(f"http://127.0.0.1:{ports.admin}/stats/prometheus",),
    )


def envoy_config(settings: LocalSettings, ports: Ports, places: Places) -> str:
    """Envoy's configuration file, YAML."""
    from cli.envoy import EnvoyConfig, render  # needs jinja2, which only those who render it have

    at = places.envoy
    return render(
        EnvoyConfig(
            public_host=at.listen,
            public_port=ports.public,
            internal_host=at.listen,
            internal_port=ports.internal,
            admin_host="127.0.0.1",
            admin_port=ports.admin,
            vllm=[f"{places.vllm.host}:{ports.vllm}"],
            extproc=f"{places.extproc.host}:{ports.extproc}",
            buffer_limit_bytes=settings.buffer_limit_bytes,
        )
    )


def _redis_url(ports: Ports, places: Places) -> str:
    return f"redis://{places.redis.host}:{ports.redis}/0"


def _secret(settings: LocalSettings) -> dict[str, str]:
    return {"ANCHORLEG_SECRET": settings.secret.get_secret_value()}


def _common(settings: LocalSettings) -> dict[str, str]:
    return {**_secret(settings), "ANCHORLEG_LOG_LEVEL": settings.log_level}
