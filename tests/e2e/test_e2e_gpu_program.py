"""The program that proves the handoff on a GPU, run here: the same code on a CPU, where float32 leaves no near ties."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROMPTS = (1, 31, 33, 600)  # about a block of 32, and over two chunks of 256
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # the sampler would be compiled with the first request, for many seconds
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


def test_what_lands_is_what_vllm_holds_and_the_engine_goes_on_as_vllm_does(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    options = ["--device", "cpu", "--model", "tiny", "--dtype", "float32", "--chunk", 256, "--block", 32]
    options += ["--prompts", *PROMPTS, "--log", tmp_path / "vllm.log", "--json", figures]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.handoff", *map(str, options)],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = json.loads(figures.read_text())
    assert [one["tokens"] for one in outcomes[:-1]] == list(PROMPTS)
    assert outcomes[-1]["cached"] > 0
    assert all(one["unequal"] == 0 and one["same"] == 64 for one in outcomes), outcomes
