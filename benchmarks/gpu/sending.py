"""The prefill leg without vLLM, as a child process: a cache on a device, the connector's own sender, and a bare writer.

`python -m benchmarks.gpu.sending CACHE` (see `cache.Cache`). The connector imports vLLM's package, which need not start.
"""

import json
import sys
import time
import uuid
from typing import Any

import torch

from benchmarks.gpu.cache import BLOCKS, Cache, sums
from benchmarks.gpu.child import obey, tell
from connector.announcer import Announcer
from connector.handoffs import Outgoing, Pending
from connector.sender import CacheMemory, Counters, Sender, SenderLimits
from handoff.claim import SignedClaim, from_params
from handoff.messages import PROTOCOL_VERSION, Final, Hello, ModelIdentity
from handoff.transport import Piece, Progress, Region
from handoff.transports import open_transport
from process.errors import ProcessError

_FORWARD_S = 0.01  # stands for the forward between a request's opening and its first blocks
_LIMIT_S = 10.0
_POLL_S = 2e-5  # between two looks at a bare write


class Sending:
    """The connector's two voices, and a second end of the transport that does nothing but write."""

    def __init__(self, cache: Cache) -> None:
        layout = cache.layout
        self._block_bytes = layout.block_bytes(0)
        shape = (BLOCKS, self._block_bytes // 2)
        self._caches = [torch.empty(shape, dtype=torch.bfloat16, device=cache.place).normal_() for _ in range(cache.layers)]
        if cache.place.type == "cuda":
            torch.cuda.synchronize(cache.place)
        self._regions = tuple(Region(one.data_ptr(), one.numel() * 2, cache.place.index) for one in self._caches)
        self._failures: list[str] = []
        self._announcer = Announcer()
        engine = uuid.uuid4().hex
        model = ModelIdentity("wire", "0" * 16, cache.context)
        self._sender = Sender(
            transport=open_transport("nixl", "prefill"),
            memory=CacheMemory(self._regions, (self._block_bytes,) * cache.layers),
            hello=Hello(PROTOCOL_VERSION, engine, 0, 1, model, layout, "nixl"),
            identity=engine.encode(),
            limits=SenderLimits(_LIMIT_S, _LIMIT_S),
            counters=Counters(lambda size, seconds: None, self._failures.append),
        )
        self._bare = open_transport("nixl", "bare")
        self._bare.register(self._regions)

    def handoff(self, params: dict[str, Any], tokens: int, blocks: list[int]) -> dict[str, Any]:
        """Send a prompt's blocks; return when the write command was given, in time.monotonic_ns."""
        claim = from_params(params)
        assert isinstance(claim, SignedClaim)
        request = f"wire-{claim.claim.handoff_id}"
        self._announcer.connect(claim.claim)
        self._sender.open(request, claim, tokens)
        time.sleep(_FORWARD_S)
        began = time.monotonic_ns()
        self._sender.write(request, 0, tuple(blocks), last=True, ready=lambda: True)
        self._announcer.send(claim.claim, Final(claim, bytes(4 * tokens), first_token=1, finished=False))
        if not self._sender.wait_settled({request}, _LIMIT_S) or self._failures:
            raise ProcessError(f"the sender did not finish ({', '.join(self._failures) or 'in time'}): see its warnings")
        self._sender.forget({request})
        return {"began_ns": began}

    def bare(self, agent: str, params: dict[str, Any], address: int, blocks: list[int]) -> dict[str, Any]:
        """Write the pieces that a handoff of these blocks is made of, with nothing around them; return the seconds."""
        claim = from_params(params)
        assert isinstance(claim, SignedClaim)
        peer = self._bare.connect(bytes.fromhex(agent))
        pieces = self._pieces(claim, address, tuple(blocks))
        began = time.perf_counter()
        transfer = self._bare.write(peer, pieces, self._regions[0])
        try:
            while transfer.poll() is not Progress.DONE:
                time.sleep(_POLL_S)
                if time.perf_counter() - began > _LIMIT_S:
                    raise ProcessError(f"a bare write of {len(pieces)} pieces took over {_LIMIT_S:g} s")
            return {"seconds": time.perf_counter() - began, "pieces": len(pieces)}
        finally:
            transfer.close()

    def content(self, blocks: list[int]) -> dict[str, Any]:
        """Return the sums of what shall land."""
        return {"sums": sums(torch.cat([cache[blocks].flatten() for cache in self._caches]))}

    def _pieces(self, claim: SignedClaim, address: int, blocks: tuple[int, ...]) -> list[Piece]:
        length = len(blocks) * self._block_bytes * len(self._regions)
        outgoing = Outgoing("bare", claim, 0, None, address=address, length=length)
        sizes = (self._block_bytes,) * len(self._regions)
        return outgoing.pieces(Pending(0, blocks, True, lambda: True), self._regions, sizes)


def main() -> None:
    """Start, then obey."""
    try:
        sending = Sending(Cache(**json.loads(sys.argv[1])))
    except Exception as error:
        tell({"error": f"the sender did not start: {type(error).__name__}: {error}"})
        raise
    obey({"handoff": sending.handoff, "bare": sending.bare, "content": sending.content})


if __name__ == "__main__":
    main()
