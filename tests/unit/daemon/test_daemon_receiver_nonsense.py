"""What a daemon cannot use is refused by name and at once, and disturbs nobody."""

import time
from typing import Any

import msgspec
import pytest

from decode_daemon.receiver import Receiver
from handoff.layout import KVLayout, Layer, contiguous_block
from handoff.messages import (
    Begin,
    Final,
    Refused,
    Sent,
    Stopped,
    Welcome,
    encode,
)
from handoff.nixl import NixlTransport
from process.errors import PortBusyError
from tests.kit.control import TOKENS, Voice, begun, sent
from tests.kit.handoff import (
    BLOCK,
    EXPECTATION,
    KEYS,
    LAYOUT,
    Landing,
    changed,
    final_of,
    hello,
    signed,
    whole,
)

GARBAGE = [
    b"",
    b"\xc1",
    b"\x91" * 100_000,
    encode(Welcome(1, "x", b"")),
    encode(hello()) + b"x",
    encode(Begin(signed(), 1))[:-3],
]


async def test_nonsense_of_one_connector_disturbs_nobody(daemon: Landing, worker: Voice) -> None:
    claim, held = await begun(daemon, worker)
    async with Voice(daemon.port) as fool:
        await fool.say(*GARBAGE, Sent("x", 1, 1, 1, 1), Stopped("x", 2**60), Final(signed(slot=99), b"", 0, finished=True))
        await fool._socket.send_multipart([b"one", b"frame", b"too many"])
        await fool.hushed()
    await worker.say(sent(claim), final_of(claim, TOKENS))
    await whole(held)


async def test_an_error_nobody_thought_of_ends_with_its_message(
    daemon: Landing, worker: Voice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon.slots[0], "begin", lambda *_: 1 / 0)
    claim, _ = daemon.claim()
    await worker.say(Begin(claim, TOKENS))
    await worker.hushed()


@pytest.mark.parametrize(
    "layout",
    [
        changed(LAYOUT, keys=BLOCK.values),
        changed(LAYOUT, keys=msgspec.structs.replace(BLOCK.keys, head=())),
        KVLayout(LAYOUT.layers, ()),
        KVLayout((*LAYOUT.layers[:2], Layer("layer.2", 7)), LAYOUT.blocks),
        KVLayout((*LAYOUT.layers[:2], Layer("layer.2", -1)), LAYOUT.blocks),
    ],
    ids=["overlapping", "no digits", "no blocks", "a block that is not there", "a negative block"],
)
async def test_a_layout_that_is_none_is_refused_with_an_answer(daemon: Landing, layout: Any) -> None:
    async with Voice(daemon.port) as voice:
        answer = await voice.hello(layout=layout)
    assert isinstance(answer, Refused)
    assert answer.field == "layout"


async def test_a_layout_made_to_waste_time_is_refused_in_no_time(daemon: Landing) -> None:
    block = contiguous_block(
        kv_heads=2, head_dim=8, block_tokens=1 << 17, dtype="float32", order=("kind", "token", "head", "dim")
    )
    began = time.monotonic()
    async with Voice(daemon.port) as voice:
        answer = await voice.hello(layout=KVLayout(LAYOUT.layers, (block,)))
    assert answer == Refused("block size", "131072", "256 at the most")
    assert time.monotonic() - began < 0.5


async def test_a_busy_port_is_named_with_the_way_out(daemon: Landing) -> None:
    transport = NixlTransport("second")
    with pytest.raises(PortBusyError, match=rf"127\.0\.0\.1:{daemon.port}.*--control-port"):
        Receiver(
            daemon_id="second",
            host="127.0.0.1",
            port=daemon.port,
            keys=KEYS,
            expectation=EXPECTATION,
            transport=transport,
        )
    transport.close()
