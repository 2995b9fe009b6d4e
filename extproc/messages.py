"""Envoy's ext_proc messages: what the stream needs of them, built and read in one place."""

from collections.abc import Mapping

from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue, HeaderValueOption
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.type.v3.http_status_pb2 import HttpStatus, StatusCode
from google.protobuf.struct_pb2 import Struct

from gateway.errors import GatewayError

METADATA_NAMESPACE = "anchorleg"
ANSWERED_HEADER = "x-anchorleg-answered"
"""Set on every answer to a rewritten request. Envoy's Lua guard turns an answer without it into a 502, and removes it."""

_OVERWRITE = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


def read_headers(headers: HeaderMap) -> dict[str, str]:
    """Return headers by lower-case name; several values of one name are joined by commas, as HTTP joins them.

    Values are read as latin-1, so that any bytes can be had back.
    """
    read: dict[str, str] = {}
    for header in headers.headers:
        value = header.raw_value.decode("latin-1") or header.value
        read[header.key] = f"{read[header.key]},{value}" if header.key in read else value
    return read


def go_on(metadata: Mapping[str, str | bool]) -> pb.ProcessingResponse:
    """Answer request headers: nothing changes."""
    return pb.ProcessingResponse(request_headers=pb.HeadersResponse(), dynamic_metadata=_metadata(metadata))


def need_body() -> pb.ProcessingResponse:
    """Answer request headers: the decision needs the body."""
    return pb.ProcessingResponse(request_headers=pb.HeadersResponse())


def body_untouched(metadata: Mapping[str, str | bool]) -> pb.ProcessingResponse:
    """Answer the request body: nothing changes."""
    return pb.ProcessingResponse(request_body=pb.BodyResponse(), dynamic_metadata=_metadata(metadata))


def body_replaced(body: bytes, metadata: Mapping[str, str | bool]) -> pb.ProcessingResponse:
    """Answer the request body: this one goes on instead. Envoy refuses another length without a content-length to match."""
    common = pb.CommonResponse(
        # The answer is read here: it must not come compressed.
        header_mutation=pb.HeaderMutation(
            set_headers=_options({"content-length": str(len(body)), "accept-encoding": "identity"})
        ),
        body_mutation=pb.BodyMutation(body=body),
    )
    return pb.ProcessingResponse(request_body=pb.BodyResponse(response=common), dynamic_metadata=_metadata(metadata))


def immediate(error: GatewayError, metadata: Mapping[str, str | bool]) -> pb.ProcessingResponse:
    """Answer the client at once, with an error in OpenAI's form."""
    headers = {"content-type": "application/json"} | {f"x-slo-{key}": str(value) for key, value in metadata.items()}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    return pb.ProcessingResponse(
        immediate_response=pb.ImmediateResponse(
            status=HttpStatus(code=StatusCode.ValueType(error.status)),
            headers=pb.HeaderMutation(set_headers=_options(headers)),
            body=error.body(),
            details=f"anchorleg_{error.code}",
        ),
        dynamic_metadata=_metadata(metadata),
    )


def response_headers(headers: Mapping[str, str], status: int | None = None) -> pb.ProcessingResponse:
    """Answer response headers: these are set, the length is what the body turns out to be."""
    values = {**headers, ANSWERED_HEADER: "1"}
    if status is not None:
        values[":status"] = str(status)
    mutation = pb.HeaderMutation(set_headers=_options(values))
    # What described vLLM's body does not describe this one.
    mutation.remove_headers.extend(["content-encoding", "etag", "content-md5"])
    if "content-length" not in headers:
        mutation.remove_headers.append("content-length")
    return pb.ProcessingResponse(response_headers=pb.HeadersResponse(response=pb.CommonResponse(header_mutation=mutation)))


def headers_passed(*, rewritten: bool) -> pb.ProcessingResponse:
    """Answer response headers of an answer that goes to the client as it is."""
    if not rewritten:
        return pb.ProcessingResponse(response_headers=pb.HeadersResponse())
    mutation = pb.HeaderMutation(set_headers=_options({ANSWERED_HEADER: "1"}))
    return pb.ProcessingResponse(response_headers=pb.HeadersResponse(response=pb.CommonResponse(header_mutation=mutation)))


def more_time(seconds: int) -> pb.ProcessingResponse:
    """Ask Envoy to wait longer for the answer to its last message."""
    response = pb.ProcessingResponse()
    response.override_message_timeout.seconds = seconds
    return response


def body_chunk(chunk: bytes, *, last: bool) -> pb.ProcessingResponse:
    """Answer response body messages: the next bytes of the client's answer."""
    streamed = pb.StreamedBodyResponse(body=chunk, end_of_stream=last)
    return pb.ProcessingResponse(
        response_body=pb.BodyResponse(response=pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=streamed)))
    )


def trailers_passed() -> pb.ProcessingResponse:
    """Answer response trailers: nothing changes."""
    return pb.ProcessingResponse(response_trailers=pb.TrailersResponse())


def _options(headers: Mapping[str, str]) -> list[HeaderValueOption]:
    return [
        HeaderValueOption(header=HeaderValue(key=key, raw_value=value.encode()), append_action=_OVERWRITE)
        for key, value in headers.items()
    ]


def _metadata(values: Mapping[str, str | bool]) -> Struct:
    struct = Struct()
    struct.update({METADATA_NAMESPACE: dict(values)})
    return struct
