"""Steps of several tokens: who may switch them off, and what the daemon makes of their time."""

from collections.abc import Callable, Iterator
from typing import get_args

import pytest

from decode_daemon.engine.protocol import FinishReason, Step
from decode_daemon.engine.speculation import SpeculationKind
from decode_daemon.pace import Pace
from decode_daemon.settings import DaemonSettings
from handoff import decode_pb2 as pb
from tests.kit.streaming import ScriptedEngine, Serve, counting, rest


@pytest.mark.parametrize(
    ("fields", "speculate"),
    [({}, True), ({"speculation": pb.DecodeRequest.AS_SET}, True), ({"speculation": pb.DecodeRequest.OFF}, False)],
)
async def test_a_request_may_switch_speculation_off(serve: Serve, fields: dict[str, int], speculate: bool) -> None:
    engine = ScriptedEngine(counting(1))
    server = await serve(engine)
    await rest(await server.landed(max_tokens=5, **fields))
    await server.all_free()
    assert [asked.speculate for asked in engine.asked] == [speculate]


def test_a_daemon_speculates_unless_it_is_told_not_to() -> None:
    setting = DaemonSettings.model_fields["speculation"]
    assert setting.default == "auto"
    assert get_args(setting.annotation) == get_args(SpeculationKind)


def test_the_pace_is_the_time_of_the_last_steps_for_all_their_tokens() -> None:
    pace = Pace()
    for _ in range(200):
        pace.observe(0.011, 1)
        pace.observe(0.019, 8)
    assert pace.token_s == pytest.approx(0.030 / 9, rel=0.1)


async def test_what_was_drafted_and_what_of_it_was_accepted_is_counted(serve: Serve) -> None:
    def script(cancelled: Callable[[], bool]) -> Iterator[Step]:
        yield Step((0, 1, 2), drafted=4, accepted=2)
        yield Step((3,), FinishReason.LENGTH, drafted=1)

    server = await serve(ScriptedEngine(script))
    await rest(await server.landed(max_tokens=5))
    await server.all_free()
    told = server.metrics.registry.get_sample_value
    assert told("anchorleg_decode_tokens_total") == 4
    assert told("anchorleg_decode_drafted_tokens_total") == 5
    assert told("anchorleg_decode_accepted_tokens_total") == 2
