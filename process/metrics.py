"""The Prometheus endpoint of one process, served from a thread of its own."""

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import REGISTRY, CollectorRegistry, start_http_server

from process.errors import PortBusyError


@contextmanager
def serve_metrics(host: str, port: int, registry: CollectorRegistry = REGISTRY) -> Iterator[int]:
    """Serve `registry` at `http://host:port/metrics` within the block; yields the port (0: the system picks).

    Raises:
        PortBusyError: the port cannot be had.
    """
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise PortBusyError(
            f"cannot serve metrics on {host}:{port}: {error.strerror or error}. "
            "Choose another address with --metrics-host and --metrics-port (0: any free port)."
        ) from None
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
