"""One vLLM of two tensor-parallel ranks in front of two decode pools, each with its own secret; the test plays the gateway."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import torch
import transformers
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr

from cli.ports import free_ports
from decode_daemon.daemon import Daemon, running
from decode_daemon.settings import DaemonSettings
from decode_daemon.slots import SlotState
from handoff import decode_pb2 as pb
from handoff.claim import CLAIM_KEY, Claim, ClaimKeys, SignedClaim, new_handoff_id, to_bytes, to_params
from handoff.decode_pb2_grpc import DecoderStub
from leases import Grant, LeaseTable, SlotRequest
from tests.kit.daemon import answer, read
from tests.kit.lane import until
from tests.kit.valkey import ValkeyProcess, eventually

NAME = "tiny"
PIPELINED = "pipelined"  # the pool whose connector sends layer by layer
CONTEXT = 1024
CHUNK = 256  # vLLM's largest step
BLOCK = 32  # of vLLM's cache
PATIENCE_S = 20.0  # with a machine that other things load
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
}
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def make_model(folder: Path, tokenizer: Path) -> None:
    """A Llama with random weights, large enough for two ranks to have KV heads of their own."""
    config = json.loads((tokenizer / "config.json").read_text())
    ids = {name: config[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, **ids, tie_word_embeddings=True))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + ("norm" in name))
    model.save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(tokenizer / name, folder / name)


@contextmanager
def vllm_server(model_dir: Path, transfer: dict[str, Any], log: Path) -> Iterator[str]:
    """A real vLLM of two ranks, one core each; gives its URL at once, before it is ready."""
    port = next(free_ports())
    options = ["--model", model_dir, "--served-model-name", NAME, "--dtype", "float32", "--max-model-len", CONTEXT]
    options += ["--tensor-parallel-size", 2, "--block-size", BLOCK, "--max-num-batched-tokens", CHUNK, "--max-num-seqs", 8]
    options += ["--enforce-eager", "--port", port, "--kv-transfer-config", json.dumps(transfer)]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "TORCHDYNAMO_DISABLE": "1",  # the sampler would be compiled with the first request, for many seconds
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *map(str, options)],
            env=os.environ | environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # its workers end with it, whatever happens
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(15)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(5)


@dataclass
class Pool:
    """A decode daemon, its lease table and its secret."""

    daemon: Daemon
    stub: Any
    table: LeaseTable
    keys: ClaimKeys

    async def claim(self, keys: ClaimKeys | None = None) -> SignedClaim:
        """A claim for a slot that the table has granted."""
        wish = SlotRequest(pool=NAME, card=self.daemon.node.card, tokens=CONTEXT, lease_ms=30_000, wait_ms=5_000)

        async def granted() -> Grant | None:
            answer = await self.table.acquire(wish)
            return answer if isinstance(answer, Grant) else None

        grant = await eventually(granted, within_s=10)
        assert grant is not None
        expires = int(time.time()) + 60
        claim = Claim(new_handoff_id(), grant.control_host, grant.control_port, grant.slot, grant.epoch, expires)
        return (keys or self.keys).sign(claim)

    async def reserved(self, claim: SignedClaim, **fields: Any) -> Any:
        """The token stream of a claim, for which the daemon holds the slot. Greedy, and ends by length alone."""
        named: dict[str, Any] = {"handoff_id": claim.claim.handoff_id, "slot": claim.claim.slot, "epoch": claim.claim.epoch}
        wishes: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "top_p": 1.0} | fields
        call = self.stub.Decode(pb.DecodeRequest(**named, claim=to_bytes(claim), **wishes))
        await read(call, "reserved", within_s=PATIENCE_S)
        return call

    def awaits(self, claim: SignedClaim) -> bool:
        """Whether some writer has begun this claim's handoff and it is not whole."""
        held = self.daemon.slots[claim.claim.slot].awaited
        return held is not None and held.epoch == claim.claim.epoch

    def content(self) -> list[bytes]:
        """Everything that lies in its landing memory."""
        return [slot.memory.view(slot.memory.length).numpy().tobytes() for slot in self.daemon.slots]

    @property
    def free(self) -> bool:
        return all(slot.state is SlotState.FREE for slot in self.daemon.slots)


@dataclass
class Front:
    """The vLLM of both pools, as a gateway talks to it."""

    client: httpx.AsyncClient
    pools: dict[str, Pool]
    log: Path

    async def ready(self, within_s: float) -> None:
        async def healthy() -> bool:
            try:
                return (await self.client.get("/health")).is_success
            except httpx.TransportError:
                return False

        await until(healthy, f"vLLM is ready (see {self.log})", within_s)

    async def complete(self, prompt: list[int], *, params: Any = None, **fields: Any) -> dict[str, Any]:
        """vLLM's answer to a prompt of token ids, greedy and past every end-of-sequence token."""
        body = {"model": NAME, "prompt": prompt, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
        body |= {"return_token_ids": True} | fields | ({"kv_transfer_params": params} if params else {})
        response = await self.client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    async def plain(self, prompt: list[int], **fields: Any) -> list[int]:
        """The ids that vLLM alone answers."""
        ids: list[int] = (await self.complete(prompt, **fields))["choices"][0]["token_ids"]
        return ids

    async def handed_over(self, pool: str, prompt: list[int], claim: SignedClaim | None = None) -> list[int]:
        """The ids that the lane answers: the first from vLLM, the others from the pool's daemon."""
        claim = claim or await self.pools[pool].claim()
        call = await self.pools[pool].reserved(claim)
        told = await self.complete(prompt, params=to_params(claim), max_tokens=1)
        landed = await read(call, "landed", within_s=PATIENCE_S)
        first = told["kv_transfer_params"][CLAIM_KEY]["first_token"]
        assert (list(landed.prompt_token_ids), landed.first_token) == (prompt, first)
        assert told["choices"][0]["token_ids"] == [first]
        return [first, *await answer(call)]

    async def quiet(self) -> None:
        """Returns when nothing is held anywhere."""

        async def holds_nothing() -> bool:
            held = [await self.metric(name) for name in ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")]
            return not any(held) and all(pool.free for pool in self.pools.values())

        await until(holds_nothing, "every slot is free and vLLM holds no block", 15)

    async def metric(self, name: str) -> float:
        families = text_string_to_metric_families((await self.client.get("/metrics")).text)
        return sum(sample.value for family in families for sample in family.samples if sample.name == f"vllm:{name}")


@asynccontextmanager
async def decode_pool(model_dir: Path, valkey: ValkeyProcess, secret: str) -> AsyncIterator[Pool]:
    """One daemon; `secret` is its pool's, NEW,OLD while it is being changed."""
    settings = DaemonSettings(
        secret=SecretStr(secret),
        redis_url=valkey.url,
        model_dir=model_dir,
        served_model_name=NAME,
        dtype="float32",
        context_tokens=CONTEXT,
        threads=1,
        pin_threads=False,
        decode_port=0,
        control_port=0,
        metrics_port=0,
        writer_grace_s=2.0,
        drain_timeout_s=5.0,
    )
    async with AsyncExitStack() as stack:
        daemon = await stack.enter_async_context(running(settings))
        table = await stack.enter_async_context(LeaseTable(valkey.url))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(daemon.node.decode_endpoint))
        yield Pool(daemon, DecoderStub(channel), table, ClaimKeys(settings.signing_keys))


@asynccontextmanager
async def two_pools(folder: Path, tokenizer: Path, secrets: dict[str, str], *others: dict[str, Any]) -> AsyncIterator[Front]:
    """vLLM with a connector for each pool's secret, and `others`, chained; ready."""
    model_dir, log = folder / "model", folder / "vllm.log"
    make_model(model_dir, tokenizer)
    connectors = []
    for name, secret in secrets.items():
        config = folder / f"{name}.toml"
        config.write_text(f"secret = {json.dumps(secret)}\n")
        connectors.append(
            {
                "kv_connector": "AnchorlegConnector",
                "kv_connector_module_path": "connector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {
                    "config": str(config),
                    "pipeline_layers": name == PIPELINED,
                    "accept_timeout_s": PATIENCE_S,
                },
            }
        )
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [*connectors, *others]},
    }
    async with AsyncExitStack() as stack:
        url = stack.enter_context(vllm_server(model_dir, transfer, log))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60.0))
        pools: dict[str, Pool] = {}
        for name, secret in secrets.items():
            own = folder / name
            own.mkdir()
            valkey = stack.enter_context(ValkeyProcess(own))
            pools[name] = await stack.enter_async_context(decode_pool(model_dir, valkey, secret))
        front = Front(client, pools, log)
        await front.ready(within_s=180)
        await front.plain([1, 2, 3])  # vLLM's first step is slow, and none of any test's business
        yield front
