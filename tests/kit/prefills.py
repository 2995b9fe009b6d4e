"""A real vLLM of a tiny model in processes of its own, asked with token ids; the test plays the gateway."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
import transformers
from prometheus_client.parser import text_string_to_metric_families

from cli.ports import free_ports
from tests.kit.lane import until

NAME = "tiny"
CONTEXT = 1024
CHUNK = 256  # vLLM's largest step
BLOCK = 32  # of vLLM's cache
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
READY_S = 180.0
# Between processes of one host UCX would write straight into memory, also into that of one that is stopped. Over TCP, as
# between hosts, a write ends only when its target has taken part.
SLOW_WIRE = {"UCX_TLS": "tcp"}


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


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """Ids that no other length and seed share."""
    return random.Random(f"{tokens} {seed}").choices(range(100, 40_000), k=tokens)


def producer(config: Path, secret: str, **settings: Any) -> dict[str, Any]:
    """vLLM's --kv-transfer-config for one connector; `secret` is its pool's and goes into the file `config`."""
    config.write_text(f"secret = {json.dumps(secret)}\n")
    return {
        "kv_connector": "AnchorlegConnector",
        "kv_connector_module_path": "connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"config": str(config), **settings},
    }


@contextmanager
def vllm_server(
    model_dir: Path,
    transfer: dict[str, Any],
    log: Path,
    *options: object,
    ranks: int = 1,
    environment: dict[str, str] | None = None,
) -> "Iterator[VllmProcess]":
    """A vLLM that is being started, and is gone after the block with every process of its own."""
    process = VllmProcess(model_dir, transfer, log, *options, ranks=ranks, environment=environment)
    try:
        process.start()
        yield process
    finally:
        process.stop()


class VllmProcess:
    """A vLLM that can be ended and started again."""

    def __init__(
        self,
        model_dir: Path,
        transfer: dict[str, Any],
        log: Path,
        *options: object,
        ranks: int = 1,
        environment: dict[str, str] | None = None,
    ) -> None:
        """`options`: more of vLLM's own. One rank takes both cores, two have one each."""
        self._transfer = json.dumps(transfer)
        self._options = ["--model", model_dir, "--served-model-name", NAME, "--dtype", "float32", "--max-model-len", CONTEXT]
        self._options += ["--tensor-parallel-size", ranks, "--block-size", BLOCK, "--max-num-batched-tokens", CHUNK]
        self._options += ["--max-num-seqs", 8, "--enforce-eager", *options]
        self._environment = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "0|1" if ranks == 2 else "0-1",
            "TORCHDYNAMO_DISABLE": "1",  # the sampler would be compiled with the first request, for many seconds
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            **(environment or {}),
        }
        self.log = log
        self.port = next(free_ports())
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "vLLM has not been started"
        return self._process.pid

    def start(self) -> None:
        """Start it, not waiting until it is ready; again, on the port that it had."""
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *map(str, self._options)]
        command += ["--port", str(self.port), "--kv-transfer-config", self._transfer]
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                env=os.environ | self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its workers end with it, whatever happens
            )

    def stop(self) -> None:
        """Ask it to end, then see to it."""
        if self._process is not None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(15)
            self.kill()

    def kill(self) -> None:
        """End all its processes at once, as a crash of the host would; of their shared memory nothing is left, either."""
        if self._process is not None:
            shared = _shared_memory(self._process.pid)
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(5)
            self._process = None
            for path in shared:
                path.unlink(missing_ok=True)


def _shared_memory(process: int) -> set[Path]:
    """What a process and those under it have made in shared memory: a kill leaves it there."""
    found: set[Path] = set()
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(process)
        for one in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                found |= {Path(mapped.path) for mapped in one.memory_maps() if mapped.path.startswith("/dev/shm/psm_")}
    return found


@dataclass(kw_only=True)
class Prefills:
    """A vLLM as a gateway talks to it."""

    client: httpx.AsyncClient
    log: Path
    model: str = NAME

    async def ready(self) -> None:
        """Returns when it serves, and has made its first step: that one is slow, and none of any test's business."""

        async def healthy() -> bool:
            try:
                return (await self.client.get("/health")).is_success
            except httpx.TransportError:
                return False

        await until(healthy, f"vLLM is ready (see {self.log})", READY_S)
        await self.plain([1, 2, 3])

    async def complete(self, prompt: list[int], *, params: Any = None, **fields: Any) -> dict[str, Any]:
        """vLLM's answer to a prompt of token ids, greedy and past every end-of-sequence token."""
        body = {"model": self.model, "prompt": prompt, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
        body |= {"return_token_ids": True} | fields | ({"kv_transfer_params": params} if params else {})
        response = await self.client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    async def plain(self, prompt: list[int], **fields: Any) -> list[int]:
        """The ids that vLLM alone answers."""
        ids: list[int] = (await self.complete(prompt, **fields))["choices"][0]["token_ids"]
        return ids

    async def holds_nothing(self) -> bool:
        """Whether it has no request and every block of its cache is free."""
        names = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")
        return not any([await self.metric(name) for name in names])

    async def metric(self, name: str) -> float:
        families = text_string_to_metric_families((await self.client.get("/metrics")).text)
        return sum(sample.value for family in families for sample in family.samples if sample.name == f"vllm:{name}")


@asynccontextmanager
async def prefills(process: VllmProcess) -> AsyncIterator[Prefills]:
    """A client of a vLLM that is being started; in the block it is ready."""
    async with httpx.AsyncClient(base_url=process.url, timeout=60.0) as client:
        vllm = Prefills(client=client, log=process.log)
        await vllm.ready()
        yield vllm
