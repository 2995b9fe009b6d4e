"""What a URL of Redis says, where it leads, and what is wrong with one that says nothing."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leases import LeaseTable
from leases.connect import connect
from leases.url import parse
from tests.kit.deployments import quoted

SECRET = "geheim"
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)  # no halves of characters: no URL has those


@pytest.mark.parametrize(
    ("url", "kind", "hosts", "name", "where"),
    [
        ("redis://", "server", [("localhost", 6379)], "", "localhost:6379"),
        ("redis:///3", "server", [("localhost", 6379)], "", "localhost:6379"),
        ("redis://one", "server", [("one", 6379)], "", "one:6379"),
        ("redis://one.test:7000/2", "server", [("one.test", 7000)], "", "one.test:7000"),
        ("rediss://[::1]", "server", [("::1", 6379)], "", "[::1]:6379"),
        ("redis://[fe80::1%eth0]:7000", "server", [("fe80::1%eth0", 7000)], "", "[fe80::1%eth0]:7000"),
        ("unix:///run/valkey.sock", "socket", [], "/run/valkey.sock", "/run/valkey.sock"),
        ("unix:///run/a%40b.sock?db=2", "socket", [], "/run/a@b.sock", "/run/a@b.sock"),
        ("redis+sentinel://one/lane", "sentinel", [("one", 26379)], "lane", "service lane of sentinels one:26379"),
        (
            "rediss+sentinel://one:1,[::2]:2,three/lane/4",
            "sentinel",
            [("one", 1), ("::2", 2), ("three", 26379)],
            "lane",
            "service lane of sentinels one:1, [::2]:2, three:26379",
        ),
        ("redis+cluster://one,two:7001", "cluster", [("one", 6379), ("two", 7001)], "", "cluster at one:6379, two:7001"),
        ("redis+cluster://one:7000/0", "cluster", [("one", 7000)], "", "cluster at one:7000"),
        ("rediss+cluster://one/?protocol=2", "cluster", [("one", 6379)], "", "cluster at one:6379"),
    ],
)
def test_where_a_url_leads(url: str, kind: str, hosts: list[tuple[str, int]], name: str, where: str) -> None:
    said = parse(url)
    assert (said.kind, list(said.hosts), said.name, said.where) == (kind, hosts, name, where)
    assert connect(url, 1).where == where
    assert ("ssl" in said.options) == url.startswith("rediss")


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("redis://one/7", {"db": 7}),
        ("redis://one/7?db=8", {"db": 8}),
        ("unix:///sock?db=2", {"db": 2}),
        ("redis+sentinel://one/lane/5", {"db": 5}),
        ("redis+cluster://one/0", {}),
        ("redis://one?protocol=3&health_check_interval=30", {"protocol": 3, "health_check_interval": 30}),
        ("redis://one?socket_keepalive=False&client_name=a%20b", {"socket_keepalive": False, "client_name": "a b"}),
        ("rediss://one?ssl_cert_reqs=none", {"ssl": True, "ssl_cert_reqs": "none"}),
        ("rediss+cluster://one?ssl_check_hostname=true", {"ssl": True, "ssl_check_hostname": True}),
        ("redis://ann@one", {"username": "ann"}),
        ("redis://:pw@one", {"password": "pw"}),
        ("unix://ann:pw@/sock", {"username": "ann", "password": "pw"}),
    ],
)
def test_options_have_their_types(url: str, options: dict[str, Any]) -> None:
    assert parse(url).options == options


@pytest.mark.parametrize(
    "start", ["redis://{}@one:7000/2", "unix://{}@/sock", "redis+sentinel://{}@a,b/lane", "redis+cluster://{}@a,b"]
)
@given(name=TEXT, password=TEXT)
def test_any_user_and_password_can_be_written(start: str, name: str, password: str) -> None:
    said = parse(start.format(f"{quoted(name)}:{quoted(password)}"))
    assert (said.options["username"], said.options["password"]) == (name, password)
    assert said.where == parse(start.format("u:v")).where


def test_files_are_looked_for_at_once(tmp_path: Path) -> None:
    authority = tmp_path / "ca.pem"
    with pytest.raises(ValueError, match=r"ssl_ca_certs .*ca\.pem, which is no file here"):
        parse(f"rediss://one?ssl_ca_certs={authority}")
    authority.touch()
    assert parse(f"rediss://one?ssl_ca_certs={authority}").options["ssl_ca_certs"] == str(authority)


def test_sentinels_are_asked_with_their_own_user_and_the_same_tls() -> None:
    url = "rediss+sentinel://ann:pw@one/lane?sentinel_username=bob&sentinel_password=pa&ssl_cert_reqs=none&protocol=2"
    said = parse(url)
    assert said.asking == {"username": "bob", "password": "pa", "ssl": True, "ssl_cert_reqs": "none"}
    assert said.options == {"username": "ann", "password": "pw", "ssl": True, "ssl_cert_reqs": "none", "protocol": 2}


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://one:6379", r"starts with one of redis://.*not with http://"),
        (f"ann:{SECRET}@one", "starts with one of"),
        (f"ann:{SECRET}@one://", "starts with one of"),
        ("", "starts with one of"),
        ("unix+sentinel:///sock", "not with unix"),
        (f"redis://ann:{SECRET}/x@one", "%2F"),
        (f"redis://ann:{SECRET}?x@one", "%3F"),
        (f"redis://ann:{SECRET}#x@one", "%23"),
        (f"redis://ann:{SECRET}", "host:port"),
        (f"redis://ann:{SECRET}@one:0", r"1\.\.65535"),
        (f"redis://ann:{SECRET}@one:70000", r"1\.\.65535"),
        (f"redis://ann:{SECRET}@one:x", "host:port"),
        (f"redis://ann:{SECRET}@::1", "IPv6"),
        (f"redis://ann:{SECRET}@one,two", "one host"),
        (f"redis://ann:{SECRET}@one/two", "database"),
        (f"unix://ann:{SECRET}@one/sock", "whole path"),
        ("unix://", "whole path"),
        (f"redis+sentinel://ann:{SECRET}@one:26379", "name of the service"),
        (f"redis+sentinel://ann:{SECRET}@one/lane/x", "database"),
        (f"redis+sentinel://ann:{SECRET}@/lane", "host:port"),
        (f"redis+cluster://ann:{SECRET}@one,,two", "host:port"),
        (f"redis+cluster://ann:{SECRET}@one/1", "no database but 0"),
        (f"redis+cluster://ann:{SECRET}@one?db=1", "no database but 0"),
        (f"redis://ann:{SECRET}@one?socket_timeout=3", "unknown option 'socket_timeout'; known are db"),
        (f"redis://ann:{SECRET}@one?ssl_cert_reqs=none", "ssl_cert_reqs is for TLS"),
        (f"redis://ann:{SECRET}@one?sentinel_password={SECRET}", "sentinel_password is for redis\\+sentinel"),
        (f"redis://ann:{SECRET}@one?protocol=4", "protocol .*one of 2, 3"),
        (f"redis://ann:{SECRET}@one?health_check_interval=-1", "health_check_interval .*whole number"),
        (f"redis://ann:{SECRET}@one?socket_keepalive=perhaps", "socket_keepalive .*true or false"),
    ],
)
def test_what_is_wrong_with_a_url_is_said_without_its_password(url: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        LeaseTable(url)
    shown = f"{caught.value!r} {caught.value.__cause__!r}"
    assert SECRET not in shown


def test_no_text_of_a_url_shows_its_password() -> None:
    said = parse(f"redis+sentinel://ann:{SECRET}@one/lane?sentinel_password={SECRET}")
    assert SECRET not in f"{said!r} {connect(f'redis://ann:{SECRET}@one', 1).where}"
