"""Stand-ins for the parts of vLLM's scheduler that the connector reads, and a daemon that listens to what it says."""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import zmq

from connector.announcer import Announcer
from connector.metadata import HandoffMetadata
from connector.scheduler import SchedulerSide
from handoff.claim import ClaimKeys, SignedClaim, to_params
from handoff.messages import Abort, Final, decode_for_daemon
from tests.kit.handoff import KEYS, signed

BLOCK = 4
FIRST = 99


class Status(Enum):
    """The names of vLLM's RequestStatus that a connector meets."""

    FINISHED_STOPPED = auto()
    FINISHED_LENGTH_CAPPED = auto()
    FINISHED_ABORTED = auto()
    FINISHED_ERROR = auto()


@dataclass
class Request:
    request_id: str
    prompt_token_ids: list[int] | None
    kv_transfer_params: Any
    output_token_ids: list[int] = field(default_factory=list)
    status: Status = Status.FINISHED_LENGTH_CAPPED
    lora_request: object = None
    prompt_embeds: object = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids or ())


@dataclass
class New:
    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


@dataclass
class Cached:
    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass
class Output:
    scheduled_new_reqs: list[New] = field(default_factory=list)
    scheduled_cached_reqs: Cached = field(default_factory=Cached)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    preempted_req_ids: set[str] | None = None
    block_table_updates: dict[str, list[int]] | None = None  # of vLLM 0.30 and 0.31

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


class Daemon:
    """A daemon's control socket that only listens, and a scheduler side that talks to it."""

    def __init__(self, serving: dict[str, Any] | None = None, keys: ClaimKeys = KEYS) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.announcer = Announcer()
        self.side = SchedulerSide(keys, BLOCK, self.announcer, serving)
        self.opened: set[str] = set()  # what the worker side knows of
        self.withdrawn: set[str] = set()

    def close(self) -> None:
        self.announcer.close()
        self._socket.close(linger=0)
        self._context.term()

    def request(
        self, tokens: int, *, name: str = "cmpl-1-a7f3", claim: SignedClaim | None = None
    ) -> tuple[Request, SignedClaim]:
        """A claimed request that vLLM has asked about, as it does more than once."""
        claim = claim or signed(port=self.port)
        request = Request(name, list(range(tokens)), to_params(claim))
        self.side.consider(request)
        self.side.consider(request)
        return request, claim

    def step(
        self,
        request: Request,
        scheduled: int,
        *,
        new: list[int] | None = None,
        computed: int = 0,
        more: list[int] | None = None,
    ) -> HandoffMetadata:
        """One engine step for this request: its first with the `new` blocks, or a later one with `more` of them."""
        name = request.request_id
        output = Output(num_scheduled_tokens={name: scheduled})
        if new is not None:
            output.scheduled_new_reqs.append(New(name, (new,), computed))
        else:
            output.scheduled_cached_reqs = Cached([name], set(), [None if more is None else (more,)], [computed])
        return self.build(output)

    def build(self, output: Output) -> HandoffMetadata:
        metadata = self.side.build(output)
        self.opened |= {opening.request_id for opening in metadata.openings}
        self.withdrawn |= {*metadata.withdrawn, *metadata.preempted}
        return metadata

    def finish(self, request: Request, status: Status = Status.FINISHED_LENGTH_CAPPED, first: int | None = FIRST) -> Any:
        """End the request; what vLLM is told must agree with what the worker will report. Returns the answer's params."""
        request.status = status
        request.output_token_ids = [] if first is None else [first]
        hold, params = self.side.finished(request)
        assert hold == (request.request_id in self.opened)
        assert self.side.finished(request) == (False, None)
        assert self.side.pending() == hold
        assert hold or params is None
        if hold and params is None:
            self.build(Output())
            assert request.request_id in self.withdrawn, "the worker is never told to stop"
        self.side.released({request.request_id, "somebody-else"})
        self.side.released({request.request_id})
        assert not self.side.pending()
        return params

    def heard(self) -> list[Final | Abort]:
        """Everything said to this daemon so far, in order."""
        mark = signed(port=self.port)
        self.announcer.send(mark.claim, Abort(mark, "the end"))
        messages: list[Final | Abort] = []
        while self._socket.poll(5000):
            message = decode_for_daemon(self._socket.recv_multipart()[1])
            assert isinstance(message, Final | Abort)
            if message.claim == mark:
                return messages
            messages.append(message)
        raise AssertionError("the mark did not come")


def chunks(*steps: HandoffMetadata) -> list[tuple[int, tuple[int, ...], bool]]:
    return [(chunk.first_block, chunk.block_ids, chunk.last) for step in steps for chunk in step.chunks]
