import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter

from process.errors import PortBusyError
from process.metrics import serve_metrics


def test_metrics_are_served_within_the_block_and_the_port_is_free_after_it() -> None:
    registry = CollectorRegistry()
    Counter("anchorleg_requests", "Requests.", registry=registry).inc(3)
    with (
        serve_metrics("127.0.0.1", 0, registry) as port,
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer,
    ):
        assert "anchorleg_requests_total 3.0" in answer.read().decode()
    with serve_metrics("127.0.0.1", port, registry) as again:
        assert again == port


def test_a_busy_port_is_refused_by_name_with_the_way_out() -> None:
    registry = CollectorRegistry()
    with (
        serve_metrics("127.0.0.1", 0, registry) as port,
        pytest.raises(PortBusyError, match=rf"127\.0\.0\.1:{port}: Address already in use.*--metrics-port"),
        serve_metrics("127.0.0.1", port, registry),
    ):
        pass
