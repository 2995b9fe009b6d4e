"""Between two hosts, each with a network of its own, every byte goes over the cable, and a host that dies is noticed."""

import hashlib
import json
import os
import subprocess
import sys

import pytest

from tests.kit.far import ROOT, SIZE
from tests.kit.two_hosts import content, own_network


@pytest.mark.parametrize("name", ["nixl", "mooncake"])
def test_a_write_goes_from_host_to_host_over_tcp(name: str) -> None:
    done = subprocess.run(
        [*own_network(), sys.executable, "-m", "tests.kit.two_hosts", name],
        cwd=ROOT,
        env={**os.environ, "UCX_TLS": "tcp"},  # NIXL would find that both hosts share their memory
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["first"] == "done"
    assert seen["digest"] == hashlib.sha256(content()).hexdigest()
    assert seen["sent"] > SIZE
    assert "target" in seen["second"]  # whose host it was
