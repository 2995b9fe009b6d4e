"""Signed permission to land one KV cache in one slot.

The gateway signs a claim and puts it into the prefill request; the connector sends nothing without a valid one; the daemon
accepts a writer only with the claim for the slot and epoch that it holds now. So no client can steer a KV cache anywhere.
"""

import hashlib
import hmac
import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

CLAIM_KEY = "anchorleg"  # under this key a claim travels in a request's kv_transfer_params
CLAIM_VERSION = 1
_CONTEXT = b"anchorleg claim"  # keeps these signatures apart from any other use of the same secret


# Claims come out of clients' requests: a number too long to be written out must not get as far as `canonical`.
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class ClaimError(Exception):
    """A claim that permits nothing: missing, malformed, forged, expired."""


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where one request's KV cache may land.

    `expires` is in unix seconds on the signer's clock: hosts are expected to agree within a few seconds, and the lifetime is
    chosen longer than that (the epoch, not the clock, is what fences).
    """

    handoff_id: str  # 128 random bits, 32 hex digits
    host: str  # of the daemon's control socket
    port: _Number
    slot: _Number
    epoch: _Number
    expires: _Number
    version: _Number = CLAIM_VERSION

    def canonical(self) -> bytes:
        """Return the bytes that are signed: every field, each with its length in front."""
        fields = (
            self.version,
            self.handoff_id,
            self.host,
            self.port,
            self.slot,
            self.epoch,
            self.expires,
        )
        parts = [str(field).encode(errors="surrogatepass") for field in fields]
        return _CONTEXT + b"".join(len(part).to_bytes(4, "big") + part for part in parts)


class SignedClaim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A claim and the HMAC-SHA256 (64 hex digits) over its canonical bytes."""

    claim: Claim
    signature: str


def new_handoff_id() -> str:
    """Return 128 random bits as 32 hex digits."""
    return secrets.token_hex(16)


class ClaimKeys:
    """The secrets shared by gateways, connectors and daemons.

    The first key signs; all verify, so that keys can be rotated without a refused request.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        if not keys or not all(keys):
            raise ValueError("claims need at least one non-empty key: set ANCHORLEG_SECRET to the same value everywhere")
        self._keys = tuple(keys)

    def sign(self, claim: Claim) -> SignedClaim:
        """Sign with the first key."""
        return SignedClaim(claim, _mac(self._keys[0], claim))

    def verify(self, signed: SignedClaim, *, now: float | None = None) -> Claim:
        """Return the claim if some key signed it and it has not expired; raise ClaimError otherwise."""
        claim = signed.claim
        if claim.version != CLAIM_VERSION:
            raise ClaimError(f"claim version {claim.version} is not {CLAIM_VERSION}")
        # Every key is tried so that the time taken does not tell which one matched.
        # As bytes, since compare_digest raises TypeError for text that is not ASCII.
        given = signed.signature.encode(errors="surrogatepass")
        matches = [hmac.compare_digest(_mac(key, claim).encode(), given) for key in self._keys]
        if not any(matches):
            raise ClaimError("the claim's signature is wrong: do both sides share ANCHORLEG_SECRET?")
        if claim.expires < (time.time() if now is None else now):
            raise ClaimError("the claim has expired")
        return claim


def to_params(signed: SignedClaim) -> dict[str, Any]:
    """Return the kv_transfer_params that carry the claim."""
    return {CLAIM_KEY: msgspec.to_builtins(signed)}


def from_params(params: object) -> SignedClaim | None:
    """Read a claim out of a request's kv_transfer_params; None if there is none.

    Raises ClaimError if there is one and it is malformed.
    """
    if not isinstance(params, dict) or CLAIM_KEY not in params:
        return None
    try:
        return msgspec.convert(params[CLAIM_KEY], SignedClaim)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # the latter for a lone surrogate in a number's place
        raise ClaimError(f"malformed claim: {error}") from error


def to_bytes(signed: SignedClaim) -> bytes:
    """Return the claim as it travels in a decode request."""
    return msgspec.msgpack.encode(signed)


def from_bytes(data: bytes) -> SignedClaim:
    """Read what `to_bytes` wrote; raises ClaimError."""
    try:
        return msgspec.msgpack.decode(data, type=SignedClaim)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ClaimError(f"malformed claim: {error}") from error


def _mac(key: bytes, claim: Claim) -> str:
    return hmac.new(key, claim.canonical(), hashlib.sha256).hexdigest()
