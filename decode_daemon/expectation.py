"""What KV caches this daemon's engine can take: a connector whose cache differs is refused by the field that does."""

from dataclasses import dataclass

from handoff.layout import FP8_BYTES, Block, GqaBlock, KVLayout, LayoutError
from handoff.messages import PROTOCOL_VERSION, Hello, ModelIdentity, Refused


@dataclass(frozen=True, slots=True)
class Expectation:
    """A model of grouped-query attention: `kv_heads` of all shards together, `dtype` of the engine's own cache.

    `block_tokens`: of the largest block, since a landing region has room for one that is only partly used.
    `accept_fp8`: also take fp8 keys and values, which become the engine's dtype with less precision than it has.
    """

    model: ModelIdentity
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    block_tokens: int
    accept_fp8: bool = False

    def mismatch(self, hello: Hello, transport: str) -> Refused | None:
        """Return the first field in which a connector differs, or None."""
        layout = hello.layout
        pairs = {
            "protocol": (hello.protocol, PROTOCOL_VERSION),
            "transport": (hello.transport, transport),
            "served model name": (hello.model.name, self.model.name),
            "model weights": (hello.model.weights, self.model.weights),
            "context tokens": (hello.model.context_tokens, self.model.context_tokens),
            "layers": (len(layout.layers), self.layers),
        }
        for field, (theirs, ours) in pairs.items():
            if theirs != ours:
                return Refused(field, str(theirs), str(ours))
        if not 0 <= hello.shard < hello.shards:
            return Refused("shard", f"{hello.shard} of {hello.shards}", "one of those, counted from 0")
        for block in layout.blocks:
            if refused := self._block_mismatch(block, hello.shards):
                return refused
        return _layout_mismatch(layout)

    def _block_mismatch(self, block: Block, shards: int) -> Refused | None:
        if not isinstance(block, GqaBlock):
            return Refused("kind of attention", str(block.__struct_config__.tag), "gqa")
        heads = block.kv_heads * shards
        if heads != self.kv_heads:
            return Refused("KV heads", f"{heads} ({block.kv_heads} in each of {shards} shards)", str(self.kv_heads))
        if block.head_dim != self.head_dim:
            return Refused("head dim", str(block.head_dim), str(self.head_dim))
        if block.dtype != self.dtype and not (self.accept_fp8 and block.dtype in FP8_BYTES):
            way_out = " (the daemon's accept_fp8_kv would take it)" if block.dtype in FP8_BYTES else ""
            return Refused("KV dtype", block.dtype, self.dtype + way_out)
        if block.block_tokens > self.block_tokens:
            return Refused("block size", str(block.block_tokens), f"{self.block_tokens} at the most")
        return None


def _layout_mismatch(layout: KVLayout) -> Refused | None:
    """Comes last: it counts elements, of which there are not many then."""
    try:
        layout.validate()
    except LayoutError as error:
        return Refused("layout", str(error), "one that can be read")
    return None
