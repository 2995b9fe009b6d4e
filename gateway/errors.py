"""What clients are told when something cannot be done: one small tree with an OpenAI form.

GatewayError
├── BadRequest        400
├── NoSlotInTime      429, with Retry-After
├── LaneUnavailable   503
└── UpstreamFailed    502
"""

import json


class GatewayError(Exception):
    """An error with a status and an OpenAI body."""

    status = 500
    kind = "internal_error"

    def __init__(self, message: str, *, code: str, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """Return the error object, one line of JSON."""
        return json.dumps(
            {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}
        ).encode()


class BadRequest(GatewayError):  # noqa: N818 - HTTP's name
    """The request asks for what the lane cannot serve, and forbids the other way."""

    status = 400
    kind = "invalid_request_error"


class NoSlotInTime(GatewayError):  # noqa: N818 - reads as what it says
    """No slot was free in time, or this caller may not have or wait for one now."""

    status = 429
    kind = "rate_limit_error"


class LaneUnavailable(GatewayError):  # noqa: N818 - as above
    """No daemon serves this model, or the lease table is away."""

    status = 503
    kind = "service_unavailable_error"


class UpstreamFailed(GatewayError):  # noqa: N818 - as above
    """A leg failed and nothing could take its place."""

    status = 502
    kind = "upstream_error"


def answer_lost() -> UpstreamFailed:
    """Return what a client is told of an answer that nobody can go on with. The cause is the log's: it may name addresses."""
    return UpstreamFailed("the answer broke off and could not be continued; send the request again", code="decode_lost")
