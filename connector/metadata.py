"""What the scheduler side tells the worker side, once per engine step."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from handoff.claim import SignedClaim


@dataclass(frozen=True, slots=True)
class Opening:
    """A claimed request that is scheduled for the first time: ask its daemon for the landing region."""

    request_id: str
    claim: SignedClaim
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Blocks whose content is final once this step's forward has run.

    `first_block` counts within the prompt; `block_ids` are vLLM's, in prompt order. The last chunk may end in a partial block.
    """

    request_id: str
    first_block: int
    block_ids: tuple[int, ...]
    last: bool


@dataclass
class HandoffMetadata(KVConnectorMetadata):
    """One step's work for the sender."""

    openings: list[Opening] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    withdrawn: list[str] = field(default_factory=list)  # ended or given up, blocks held: send no more
    preempted: list[str] = field(default_factory=list)  # blocks lost with this step: fence before it runs
    computes: bool = True  # False: vLLM takes this step only to learn which blocks are free
