"""`anchorleg bench handoff`: that it measures real handoffs, says what its rounds say, and ends in one line where it cannot."""

import importlib
import os
import subprocess
import sys
import warnings
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.handoff_gap import Gap
from benchmarks.handoff_gap import told as gap_told
from benchmarks.handoff_prefill import Memory, Round, Turn
from benchmarks.handoff_prefill import told as prefill_told
from benchmarks.handoff_stack import LANE, PLAIN, Prompts, services
from benchmarks.handoff_wire import LAYOUT, PROMPTS, Pair, measure
from benchmarks.handoff_wire import told as wire_told
from benchmarks.report import goals
from cli.ports import choose_ports, free_ports
from cli.settings import LocalSettings


@pytest.fixture
def connector() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of vLLM's own making
        importlib.import_module("connector")


@pytest.mark.usefixtures("connector")
async def test_the_wire_is_measured_with_real_handoffs_and_raw_writes_between_two_processes() -> None:
    measures = {m.name: m for m in await measure(["nixl"], rounds=1, prompts=(128, 256))}
    assert set(measures) == {*(f"nixl_{n}_{what}" for n in (128, 256) for what in ("gb_per_second", "of_raw")), "bytes_of_raw"}
    assert all(m.value > 0 for m in measures.values())
    assert measures["bytes_of_raw"].value == measures["nixl_256_of_raw"].value


def test_a_block_of_the_benchmark_has_smollm2s_bytes() -> None:
    assert LAYOUT.block_bytes(0) == 98_304
    assert [LAYOUT.bytes_for(tokens) for tokens in PROMPTS] == [30 * 98_304 * blocks for blocks in (1, 8, 32)]


def test_the_share_of_the_raw_write_is_the_slowest_transports_at_the_longest_prompt() -> None:
    fast, slow = [Pair(handoff=0.011, raw=0.010)], [Pair(handoff=0.020, raw=0.010)]
    measures = {m.name: m for m in wire_told({"nixl": {128: slow, 4096: fast}, "mooncake": {128: fast, 4096: slow}})}
    assert measures["bytes_of_raw"].value == pytest.approx(50)
    assert measures["bytes_of_raw"].detail == "mooncake, at 4096 tokens"
    assert measures["nixl_4096_of_raw"].value == pytest.approx(100 / 1.1)


def test_a_share_is_taken_round_by_round_so_that_a_slow_round_slows_both() -> None:
    rounds = [Pair(handoff=0.02, raw=0.01), Pair(handoff=0.2, raw=0.1), Pair(handoff=0.04, raw=0.02)]
    measures = {m.name: m for m in wire_told({"nixl": {4096: rounds}})}
    assert measures["bytes_of_raw"].value == pytest.approx(50)


def test_the_gap_is_less_a_step_and_over_what_no_handoff_can_do_without() -> None:
    gaps = [Gap(gap=0.050 + slow, landed=-0.002, step=0.020, convert=0.010, raw=0.010) for slow in (0.0, 0.0, 1.0)]
    measures = {m.name: m for m in gap_told(gaps)}
    assert measures["gap_over_least"].value == pytest.approx(1.5)
    assert measures["gap_landed_ms"].value == pytest.approx(-2)


def test_throughputs_are_compared_by_the_turns_that_nothing_disturbed() -> None:
    def turn(seconds: float) -> Turn:
        return Turn(seconds, cpu_s=1.0)

    quiet = Round(claimed=turn(1 / 0.96), unclaimed=turn(1), without=turn(1))
    slow = Round(claimed=turn(1.5), unclaimed=turn(3), without=turn(2))
    measures = {m.name: m for m in prefill_told([quiet, quiet, quiet, slow, slow], Memory(claimed=500_000, unclaimed=0))}
    assert measures["prefill_claimed_of_without"].value == pytest.approx(96)
    assert measures["prefill_unclaimed_of_without"].value == pytest.approx(100)
    assert measures["prefill_without_per_second"].value == pytest.approx(3_840)
    assert measures["memory_growth_mb"].value == pytest.approx(0.5)


def test_a_share_says_how_far_other_rounds_would_take_it() -> None:
    def rounds(*seconds: float) -> list[Round]:
        return [Round(claimed=Turn(s, 1.0), unclaimed=Turn(1.0, 1.0), without=Turn(1.0, 1.0)) for s in seconds]

    def how(*seconds: float) -> str:
        found = prefill_told(rounds(*seconds), Memory(0, 0))
        return next(m.detail for m in found if m.name == "prefill_claimed_of_without")

    assert "95 %: 50.0 to 50.0" in how(2.0, 2.0, 2.0, 2.0)
    assert "95 %: 28.6 to 100.0" in how(1.0, 2.0, 3.0, 4.0)


def test_every_goal_is_measured_by_some_part() -> None:
    turn = Turn(1.0, 1.0)
    measures = [
        *wire_told({"nixl": {4096: [Pair(1.0, 1.0)]}}),
        *gap_told([Gap(1.0, 1.0, 1.0, 1.0, 1.0)]),
        *prefill_told([Round(turn, turn, turn)], Memory(0, 0)),
    ]
    assert goals("handoff").keys() <= {m.name for m in measures}


def test_both_vllms_have_one_thread_and_only_one_has_a_connector(tmp_path: Path) -> None:
    settings = LocalSettings.load(ports="auto", model_dir=tmp_path)
    [plain_port] = islice(free_ports(), 1)
    found = {service.name: service for service in services(settings, choose_ports(settings), plain_port, "mooncake")}
    lane, plain = found[LANE], found[PLAIN]
    assert lane.environment["VLLM_CPU_OMP_THREADS_BIND"] == plain.environment["VLLM_CPU_OMP_THREADS_BIND"] == "0"
    assert "--kv-transfer-config" in lane.command
    assert not any("onnector" in word for word in plain.command)
    assert str(plain_port) in plain.command
    assert lane.environment["ANCHORLEG_CONNECTOR_TRANSPORT"] == found["decode"].environment["ANCHORLEG_DAEMON_TRANSPORT"]


def test_no_two_prompts_begin_alike() -> None:
    prompts = Prompts()
    made = [prompts.next(256).ids for _ in range(50)]
    assert len({ids[:4] for ids in made}) == 50
    assert {len(ids) for ids in made} == {256}


def test_a_missing_model_is_told_in_one_line(tmp_path: Path) -> None:
    done = bench_handoff("--part", "gap", "--transport", "nixl", "--model-dir", str(tmp_path / "none"))
    assert done.returncode == 2
    assert f"anchorleg: there is no model in {tmp_path / 'none'}: `anchorleg model` prepares SmolLM2 there" in done.stderr
    assert "Traceback" not in done.stderr


def bench_handoff(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "cli.main", "bench", "handoff", *arguments]
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
