"""A daemon that says nothing for long costs no answer, whatever Envoy sends meanwhile.

Envoy pings a connection on which nothing happens, and gRPC by default ends a connection at the fourth ping without data:
after some 40 s, with every answer that is on it. Here Envoy pings ten times as often, so that some seconds are as long.
"""

import asyncio
from pathlib import Path

from tests.kit.lane import chat, lane_stack

USUAL = "connection_keepalive: {interval: 10s,"
OFTEN = "connection_keepalive: {interval: 1s,"
SILENCE_S = 6.0


def pinging_often(config: str) -> str:
    assert config.count(USUAL) == 1, "Envoy pings otherwise than it is known here"
    return config.replace(USUAL, OFTEN)


async def test_answers_outlast_a_silence_of_several_of_envoys_pings(tmp_path: Path) -> None:
    async with lane_stack(tmp_path, configured=pinging_often, queue_timeout_s=20.0) as lane:
        lane.daemon.script.silence_s = SILENCE_S
        whole, stream = await asyncio.gather(lane.post(chat()), lane.post(chat(stream=True)))
        assert whole.status_code == 200, whole.text
        assert whole.json()["choices"][0]["message"]["content"] == "Hello"
        assert stream.text.rstrip().endswith("[DONE]")
        assert len(lane.daemon.requests) == 2, "no answer was begun again"
        assert not lane.vllm.bodies("/v1/completions"), "vLLM finished an answer"
        await lane.all_free()
