"""The scheduler side and claims: which of them make a request one of ours, and for how long."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from connector.metadata import HandoffMetadata
from connector.scheduler import UsedClaims
from handoff.claim import CLAIM_KEY, ClaimError, ClaimKeys, to_params
from handoff.messages import Final
from tests.kit.handoff import signed
from tests.kit.scheduling import Daemon, Request, Status


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    here = Daemon()
    yield here
    here.close()


STRANGERS = ClaimKeys([b"a key of somebody else"])
UNCLAIMED: dict[str, Callable[[int], Any]] = {
    "no params": lambda port: None,
    "empty params": lambda port: {},
    "another connector's": lambda port: {"remote_engine_id": "x"},
    "malformed": lambda port: {CLAIM_KEY: {"claim": {}}},
    "not an object": lambda port: {CLAIM_KEY: "yes"},
    "forged": lambda port: to_params(signed(port=port, keys=STRANGERS)),
    "signed in letters": lambda port: {CLAIM_KEY: to_params(signed(port=port))[CLAIM_KEY] | {"signature": "é"}},
    "expired": lambda port: to_params(signed(port=port, life_s=-1)),
}


@pytest.mark.parametrize("params", UNCLAIMED.values(), ids=UNCLAIMED.keys())
def test_a_request_without_a_valid_claim_is_none_of_our_business(daemon: Daemon, params: Callable[[int], Any]) -> None:
    request = Request("r", list(range(10)), params(daemon.port))
    for _ in range(2):
        daemon.side.consider(request)
    assert daemon.step(request, 10, new=[1, 2, 3]) == HandoffMetadata()
    assert daemon.finish(request) is None
    assert daemon.heard() == []


def test_while_keys_are_being_changed_claims_of_both_are_good() -> None:
    new, old = b"the new key", b"the old key"
    daemon = Daemon(keys=ClaimKeys([new, old]))
    try:
        for index, key in enumerate((new, old)):
            claim = signed(port=daemon.port, keys=ClaimKeys([key]))
            request, _ = daemon.request(4, name=f"r{index}", claim=claim)
            assert [opening.claim for opening in daemon.step(request, 4, new=[1]).openings] == [claim]
            assert daemon.finish(request) is not None
        assert [type(message) for message in daemon.heard()] == [Final, Final]
    finally:
        daemon.close()


@pytest.mark.parametrize("when", ["while the first runs", "after it"])
def test_a_claim_is_good_for_one_request_and_a_second_cannot_end_the_firsts_handoff(daemon: Daemon, when: str) -> None:
    request, claim = daemon.request(4, name="first")
    daemon.step(request, 4, new=[1])
    if when == "after it":
        assert daemon.finish(request) is not None
    replay, _ = daemon.request(4, name="second", claim=claim)
    assert daemon.step(replay, 4, new=[2]) == HandoffMetadata()
    assert daemon.finish(replay, Status.FINISHED_ABORTED, first=None) is None
    if when == "while the first runs":
        assert daemon.finish(request) is not None
    assert [type(message) for message in daemon.heard()] == [Final]


def test_used_claims_are_remembered_until_they_expire_and_no_longer() -> None:
    used = UsedClaims()
    claims = [msgspec.structs.replace(signed().claim, expires=100 + index) for index in range(50)]
    for claim in claims:
        used.take(claim, now=90)
    for now, claim in ((99, claims[0]), (100, claims[0]), (120, claims[20])):
        with pytest.raises(ClaimError, match=f"of slot {claim.slot} has been used by an earlier request"):
            used.take(claim, now=now)
    used.take(signed().claim, now=10_000)
    assert len(used) == 1


def test_a_flood_of_foreign_claims_fills_no_log(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="vllm.anchorleg")
    for index in range(100):
        daemon.side.consider(Request(f"r{index}", [1], to_params(signed(keys=STRANGERS))))
    assert [record.message for record in caplog.records if "signature is wrong" in record.message] == [
        "request r0: the claim's signature is wrong: do both sides share ANCHORLEG_SECRET?; it is served as an ordinary request"
    ]
