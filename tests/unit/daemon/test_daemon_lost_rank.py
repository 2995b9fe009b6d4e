"""A daemon whose engine is two processes ends when one of them is killed, also while nobody asks anything of it."""

import json
import os
import signal
import time
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from tests.kit.apart import apart
from tests.kit.ranks import INTERPRETED, RANKS
from tests.kit.valkey import ValkeyProcess

pytest.importorskip("triton")

NOTICED_S = 3.0
EXIT_LOST = 1
SETTINGS = {"tensor_parallel": RANKS, "context_tokens": 128, "speculation": "off"}


async def test_an_idle_daemon_ends_with_status_1_soon_after_a_rank_is_killed(
    model_dir: Path, valkey: ValkeyProcess, tmp_path: Path
) -> None:
    log = tmp_path / "decode.log"
    how = {"program": "tests.kit.ranks", "environment": INTERPRETED}
    async with apart(model_dir, valkey, "a secret of the ranks", log, **how, **SETTINGS) as daemon:
        [rank] = [child for child in psutil.Process(daemon.pid).children() if "spawn_main" in " ".join(child.cmdline())]
        os.kill(rank.pid, signal.SIGKILL)
        killed = time.time()
        assert await daemon.ended(within_s=30) == EXIT_LOST
    [told] = [line for line in log.read_text().splitlines() if '"engine lost"' in line]
    lost = json.loads(told)
    assert lost["error"].endswith(f"its process (pid {rank.pid}) ended with exit code -9. Restart the daemon")
    assert datetime.fromisoformat(lost["timestamp"]).timestamp() - killed < NOTICED_S
