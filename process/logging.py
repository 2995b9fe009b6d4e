"""Logging of one process: structlog in front, the standard library's loggers through the same pipe.

Lines go to standard error: for a person (console) on a terminal, one JSON object each elsewhere.
"""

import logging
import sys
from typing import Literal, TextIO

import structlog
from structlog.tracebacks import ExceptionDictTransformer


def configure_logging(
    process: str,
    *,
    level: str = "info",
    style: Literal["console", "json"] | None = None,
    stream: TextIO | None = None,
) -> None:
    """Send every log line of this process to `stream` (standard error), each with its `process` name.

    `style` None means console on a terminal and JSON elsewhere. Calling again replaces the earlier set-up.
    """
    out = sys.stderr if stream is None else stream
    console = out.isatty() if style is None else style == "console"
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _name_process(process),
    ]
    renderer: list[structlog.typing.Processor] = (
        [structlog.dev.ConsoleRenderer(colors=out.isatty())] if console else [_tracebacks, structlog.processors.JSONRenderer()]
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.processors.StackInfoRenderer(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


_CHATTY = ("httpx", "httpx2", "httpcore", "httpcore2")  # a line for each request

# Without local variables: they hold clients' prompts and credentials.
_tracebacks = structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False))


def _name_process(process: str) -> structlog.typing.Processor:
    def add(
        _logger: structlog.typing.WrappedLogger, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        return {**event, "process": process}

    return add
