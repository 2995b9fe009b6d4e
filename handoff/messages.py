"""Control messages between connectors and daemons: small, typed, over ZeroMQ (one msgpack frame each).

A KV cache comes in shards, one from each tensor-parallel rank that holds heads of its own. The worker side of a connector (one
per rank that writes) says Hello once, then Begin / Sent / Abort for each handoff. The scheduler side says Final, which carries
what only it knows. The daemon answers Welcome or Refused, Accepted or Rejected, and Cancel when it no longer wants a handoff; a
worker answers Cancel with Stopped once none of its writes is in flight, which is what lets the daemon reuse the memory. Waiting
asks a writer that has said its last word of the handoff to say it again; where it cannot be delivered, that writer is gone.

A worker's socket to a daemon is a link, whose name is the socket's ZeroMQ identity. It goes in a frame before each message but
Hello, which daemons of every version shall read: what was read from a connection that has broken comes from an identity that
ZeroMQ made up, once the link has connected again. What was on its way then may be lost, so Hello, Begin, Cancel and last words
are said again until they are answered, and mean the same as said once.
"""

import msgspec

from handoff.claim import SignedClaim
from handoff.layout import KVLayout

# 1: one rank. 2: shards of several ranks, layouts of several kinds of block, Waiting. 3: landing memory on GPUs. 4: messages
# name their link, and are repeated.
PROTOCOL_VERSION = 4

MAX_MESSAGE_BYTES = 16 << 20  # a Final with a million prompt tokens is 4 MB


class ModelIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What both legs must agree on before KV of one is of use to the other."""

    name: str  # served model name
    weights: str  # digest of the configuration both loaded (see handoff.identity)
    context_tokens: int


class Hello(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A worker introduces itself: who it is, which part of the heads it holds, how its cache lies, what it writes with.

    `engine_id` is that of its vLLM, the same for all ranks. `shard` counts from 0 to `shards` - 1, in the order of the heads.
    """

    protocol: int
    engine_id: str
    shard: int
    shards: int
    model: ModelIdentity
    layout: KVLayout
    transport: str


class Begin(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A worker asks to write one request's KV of `tokens` prompt positions."""

    claim: SignedClaim
    tokens: int


class Sent(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """All of this shard's blocks are in the landing region: its writes have completed at the target."""

    handoff_id: str
    epoch: int
    tokens: int
    blocks: int
    bytes: int


class Final(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Prefill is over: the prompt's token ids (little-endian uint32) and the first token, from the scheduler side."""

    claim: SignedClaim
    prompt: bytes
    first_token: int
    finished: bool  # the first token already ends the answer: nothing to decode


class Abort(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The sender gives up on this handoff.

    From a worker, `writing` False means that none of its writes is or will be in flight, True that one may be.
    """

    claim: SignedClaim
    reason: str
    writing: bool = False


class Stopped(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The answer to Cancel: none of this worker's writes for the handoff is or will be in flight."""

    handoff_id: str
    epoch: int


class Welcome(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The daemon can read this worker's cache; `agent` is the transport metadata to connect with."""

    protocol: int
    daemon_id: str
    agent: bytes


class Refused(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The daemon cannot read this worker's cache: which field differs, and both values."""

    field: str
    theirs: str
    ours: str

    def describe(self) -> str:
        """Return the sentence for a log."""
        return f"{self.field} differs: the connector has {self.theirs}, the daemon has {self.ours}"


class Accepted(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The worker may write its shard of this handoff from `address` on, `length` bytes at the most."""

    handoff_id: str
    address: int
    length: int


class Rejected(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The worker may not write this handoff, and need not say Abort. `hello`: introduce yourself (again) first."""

    handoff_id: str
    reason: str
    hello: bool = False


class Cancel(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The daemon no longer wants this handoff: stop writing, answer Stopped."""

    handoff_id: str
    epoch: int
    reason: str


class Waiting(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The daemon still waits for this handoff, of which the worker is a writer that has not said Sent."""

    handoff_id: str
    epoch: int


ToDaemon = Hello | Begin | Sent | Final | Abort | Stopped
ToConnector = Welcome | Refused | Accepted | Rejected | Cancel | Waiting


class MessageError(Exception):
    """A control message that is not one."""


_encoder = msgspec.msgpack.Encoder()
_to_daemon = msgspec.msgpack.Decoder(ToDaemon)
_to_connector = msgspec.msgpack.Decoder(ToConnector)


def encode(message: ToDaemon | ToConnector) -> bytes:
    """Return the message's wire form."""
    return _encoder.encode(message)


def decode_for_daemon(frame: bytes) -> ToDaemon:
    """Read a message sent to a daemon; raises MessageError."""
    try:
        return _to_daemon.decode(frame)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MessageError(str(error)) from error


def decode_for_connector(frame: bytes) -> ToConnector:
    """Read a message sent to a connector; raises MessageError."""
    try:
        return _to_connector.decode(frame)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MessageError(str(error)) from error
