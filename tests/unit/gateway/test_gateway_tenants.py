"""Tenants: whatever the header says is one account, and no two values are the same one."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.settings import GatewaySettings
from gateway.tenants import NAMELESS, tenant_of
from process.errors import ConfigError
from tests.kit.gateway import SECRET


def settings(**values: Any) -> GatewaySettings:
    return GatewaySettings.load(**{"secret": SECRET, "tenant_header": "x-tenant"} | values)


SETTINGS = settings(tenant_max_leases=2, tenant_max_waiting=3)


def name_of(value: str | None) -> str:
    tenant = tenant_of(value, SETTINGS)
    assert tenant is not None
    assert (tenant.max_leases, tenant.max_waiting) == (2, 3)
    return tenant.name


def test_without_a_header_for_them_there_are_no_tenants() -> None:
    assert tenant_of("a", settings(tenant_header="")) is None


@pytest.mark.parametrize("value", [None, "", "  "])
def test_requests_without_a_name_share_one_account(value: str | None) -> None:
    assert name_of(value) == NAMELESS


@pytest.mark.parametrize("value", ["acme", "acme,acme", "CN=a, O=b", "Ã¼", "x" * 256])
def test_a_name_is_the_whole_value(value: str) -> None:
    assert name_of(value) == value == name_of(f" {value} ")


def test_long_names_stay_apart_and_are_no_other_value() -> None:
    one, two = name_of("x" * 60_000 + "1"), name_of("x" * 60_000 + "2")
    assert one != two
    assert len(one) == len(two) == 257
    assert name_of(one) != one


@given(st.lists(st.text(alphabet=st.characters(max_codepoint=255), min_size=1, max_size=400), max_size=8))
def test_distinct_values_are_distinct_accounts(values: list[str]) -> None:
    named = {value.strip() for value in values} - {""}
    assert len({name_of(value) for value in named}) == len(named)


def test_a_header_has_no_case_and_must_be_one() -> None:
    assert settings(tenant_header=" X-Tenant ").tenant_header == "x-tenant"
    with pytest.raises(ConfigError, match="--tenant-header"):
        settings(tenant_header="x tenant:")


@pytest.mark.parametrize("name", ["tenant_max_leases", "tenant_max_waiting"])
def test_limits_without_tenants_are_an_error_that_names_the_way_out(name: str) -> None:
    with pytest.raises(ConfigError, match=r"set tenant_header too"):
        settings(tenant_header="", **{name: 1})


def test_a_default_wait_beyond_the_limit_is_an_error_that_names_the_limit() -> None:
    assert settings(max_wait_ms=100, default_wait_ms=100).default_wait_ms == 100
    with pytest.raises(ConfigError, match=r"--default-wait-ms.*max_wait_ms allows 100 ms"):
        settings(max_wait_ms=100, default_wait_ms=101)
