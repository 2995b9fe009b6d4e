import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from process.logging import configure_logging


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def test_lines_of_structlog_and_of_the_standard_library_come_as_one_json_object_each() -> None:
    out = io.StringIO()
    configure_logging("gateway", stream=out)
    structlog.get_logger("lane").info("lease acquired", slot="d0/1")
    logging.getLogger("grpc").warning("lost %s", "peer")
    ours, theirs = map(json.loads, out.getvalue().splitlines())
    assert (ours["event"], ours["slot"], ours["process"], ours["level"]) == (
        "lease acquired",
        "d0/1",
        "gateway",
        "info",
    )
    assert (theirs["event"], theirs["logger"], theirs["level"]) == ("lost peer", "grpc", "warning")


def test_an_exception_is_part_of_its_json_line() -> None:
    out = io.StringIO()
    configure_logging("gateway", stream=out, style="json")
    try:
        raise ValueError("broken")
    except ValueError:
        structlog.get_logger().exception("failed")
    assert json.loads(out.getvalue())["exception"][0]["exc_value"] == "broken"


def test_console_lines_are_for_reading() -> None:
    out = io.StringIO()
    configure_logging("gateway", stream=out, style="console")
    structlog.get_logger().info("ready", port=1)
    assert "ready" in out.getvalue()
    assert not out.getvalue().startswith("{")


def test_lines_below_the_level_are_dropped() -> None:
    out = io.StringIO()
    configure_logging("gateway", level="warning", stream=out)
    structlog.get_logger().info("quiet")
    logging.getLogger("grpc").info("quiet")
    assert out.getvalue() == ""
