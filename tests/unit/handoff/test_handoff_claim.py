"""Nothing but an unaltered, unexpired claim of a shared key permits anything."""

import dataclasses
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from handoff.claim import CLAIM_KEY, Claim, ClaimError, ClaimKeys, SignedClaim, from_params, new_handoff_id, to_params
from tests.kit.handoff import KEYS, signed

OLD, NEW = b"old key old key!", b"new key new key!"
FIELDS = Claim.__struct_fields__
NUMBERS = st.integers(0, 2**63 - 1)
CLAIMS = st.builds(Claim, st.text(), st.text(), NUMBERS, NUMBERS, NUMBERS, NUMBERS)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def test_a_signed_claim_comes_back_as_it_was() -> None:
    claim = signed()
    assert KEYS.verify(claim) == claim.claim


@given(CLAIMS)
def test_the_params_of_a_request_carry_a_claim_unchanged(claim: Claim) -> None:
    sent = KEYS.sign(claim)
    params = msgspec.json.decode(msgspec.json.encode(to_params(sent)))
    assert from_params(params) == sent
    assert KEYS.verify(sent, now=0) == claim


@given(CLAIMS, st.sampled_from(FIELDS), st.data())
def test_any_other_value_of_any_field_is_refused(claim: Claim, name: str, data: st.DataObject) -> None:
    sent = KEYS.sign(claim)
    other = data.draw(st.text() if isinstance(getattr(claim, name), str) else NUMBERS)
    assume(other != getattr(claim, name))
    altered = msgspec.structs.replace(claim, **{name: other})
    with pytest.raises(ClaimError):
        KEYS.verify(SignedClaim(altered, sent.signature), now=0)


def test_moving_characters_from_one_field_to_the_next_is_refused() -> None:
    claim = Claim("ab", "c1", 1, 1, 1, 2**40)
    moved = Claim("abc", "11", 1, 1, 1, 2**40)
    with pytest.raises(ClaimError, match="signature"):
        KEYS.verify(SignedClaim(moved, KEYS.sign(claim).signature))


@given(st.text(st.characters(codec=None)))
def test_any_other_signature_is_refused_in_every_script(signature: str) -> None:
    claim = signed()
    assume(signature != claim.signature)
    with pytest.raises(ClaimError, match="signature"):
        KEYS.verify(SignedClaim(claim.claim, signature))


def test_both_keys_verify_while_a_key_is_changed_and_the_first_one_signs() -> None:
    both = ClaimKeys([NEW, OLD])
    before, after = ClaimKeys([OLD]), ClaimKeys([NEW])
    assert both.verify(signed(keys=before))
    assert both.verify(signed(keys=after))
    assert after.verify(signed(keys=both))
    with pytest.raises(ClaimError, match="ANCHORLEG_SECRET"):
        before.verify(signed(keys=both))


@pytest.mark.parametrize("keys", [[], [b""], [NEW, b""]])
def test_keys_that_anybody_knows_are_no_keys(keys: list[bytes]) -> None:
    with pytest.raises(ValueError, match="ANCHORLEG_SECRET"):
        ClaimKeys(keys)


def test_a_claim_ends_with_its_last_second() -> None:
    claim = signed()
    assert KEYS.verify(claim, now=claim.claim.expires)
    with pytest.raises(ClaimError, match="expired"):
        KEYS.verify(claim, now=claim.claim.expires + 0.01)
    with pytest.raises(ClaimError, match="expired"):
        KEYS.verify(signed(life_s=-1))


def test_another_version_of_claims_is_refused_by_name() -> None:
    other = msgspec.structs.replace(signed().claim, version=2)
    with pytest.raises(ClaimError, match="version 2 is not 1"):
        KEYS.verify(KEYS.sign(other))


@pytest.mark.parametrize("params", [None, {}, {"remote_host": "x"}, [], "anchorleg", 5])
def test_params_without_a_claim_have_none(params: object) -> None:
    assert from_params(params) is None


@given(JSON)
def test_whatever_else_stands_in_a_claims_place_is_refused(value: Any) -> None:
    with pytest.raises(ClaimError):
        KEYS.verify(from_params({CLAIM_KEY: value}))  # type: ignore[arg-type]


@given(st.sampled_from(FIELDS), JSON | st.just("\ud800") | st.just(10**5000))
def test_a_claim_with_anything_in_one_field_is_refused_and_never_fails_otherwise(name: str, value: Any) -> None:
    params = to_params(signed())
    assume(type(value) is not type(params[CLAIM_KEY]["claim"][name]) or value != params[CLAIM_KEY]["claim"][name])
    params[CLAIM_KEY]["claim"][name] = value
    with pytest.raises(ClaimError):
        KEYS.verify(from_params(params))  # type: ignore[arg-type]


@pytest.mark.parametrize("where", [(), ("claim",)])
def test_a_field_too_many_or_too_few_is_refused(where: tuple[str, ...]) -> None:
    for change in ("more", "less"):
        params = to_params(signed())
        place = params[CLAIM_KEY]
        for name in where:
            place = place[name]
        if change == "more":
            place["admin"] = True
        else:
            place.pop(next(iter(place)))
        with pytest.raises(ClaimError, match="malformed"):
            from_params(params)


def test_handoff_ids_are_128_random_bits() -> None:
    ids = {new_handoff_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(len(bytes.fromhex(one)) == 16 for one in ids)


def test_a_claim_cannot_be_altered_in_place() -> None:
    with pytest.raises((AttributeError, dataclasses.FrozenInstanceError)):
        signed().claim.slot = 1  # type: ignore[misc]
