"""What a URL says of Redis or Valkey: one server, a primary found by Sentinel, or a cluster.

    redis://[user:password@]host[:port][/db]                           one server, port 6379
    unix://[user:password@]/path/of/socket                             the same through its socket
    redis+sentinel://[user:password@]host[:port],.../service[/db]      sentinels, port 26379
    redis+cluster://[user:password@]host[:port],...                    some nodes of a cluster, port 6379

`rediss` in place of `redis` is the same over TLS. User and password are percent-encoded, an IPv6 address stands in brackets.
Options of the client follow as a query, such as `?ssl_ca_certs=/etc/ca.pem`; `_OPTIONS` has them all. Sentinels are asked with
the same TLS options as the server, and with `sentinel_username` and `sentinel_password` where they want any.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote

_SCHEMES = {
    f"{base}{kind}": (kind[1:] or "server", base == "rediss")
    for base in ("redis", "rediss")
    for kind in ("", "+sentinel", "+cluster")
} | {"unix": ("socket", False)}
_PORTS = {"server": 6379, "sentinel": 26379, "cluster": 6379}


def _number(text: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text):
        raise ValueError("must be a whole number")
    return int(text)


def _switch(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("must be true or false")
    return text.lower() == "true"


def _file(text: str) -> str:
    if not Path(text).is_file():
        raise ValueError(f"names {text}, which is no file here")
    return text


def _one_of(*choices: str) -> Callable[[str], str]:
    def choose(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return text

    return choose


_OPTIONS: Mapping[str, Callable[[str], Any]] = {
    "db": _number,
    "protocol": lambda text: int(_one_of("2", "3")(text)),
    "client_name": str,
    "health_check_interval": _number,
    "socket_keepalive": _switch,
    "ssl_ca_certs": _file,
    "ssl_certfile": _file,
    "ssl_keyfile": _file,
    "ssl_cert_reqs": _one_of("required", "optional", "none"),
    "ssl_check_hostname": _switch,
    "ssl_ciphers": str,
    "sentinel_username": str,
    "sentinel_password": str,
}


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """What a URL says. Neither its text nor that of any error shows the user or the password."""

    kind: str  # server, socket, sentinel or cluster
    hosts: tuple[tuple[str, int], ...]  # of the server, of sentinels, or of some nodes of the cluster; () for a socket
    name: str  # path of the socket, or Sentinel's name of the service
    options: Mapping[str, Any] = field(repr=False)  # for the client of the server, user and password among them
    asking: Mapping[str, Any] = field(repr=False)  # for clients of sentinels

    @property
    def where(self) -> str:
        """Where it leads, for people."""
        hosts = ", ".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        named = {"socket": self.name, "sentinel": f"service {self.name} of sentinels {hosts}", "cluster": f"cluster at {hosts}"}
        return named.get(self.kind, hosts)


def parse(url: str) -> RedisUrl:
    """Read a URL. Raises ValueError, with a message that shows nothing of user and password."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in _SCHEMES:
        given = f", not with {scheme}://" if separator and re.fullmatch(r"[\w+.-]+", scheme) else ""
        raise ValueError(f"the URL of Redis starts with one of {', '.join(f'{name}://' for name in _SCHEMES)}{given}")
    kind, tls = _SCHEMES[scheme]
    authority, path, query = _split(rest)
    user, _, places = authority.rpartition("@")
    options = _query(query, kind, tls)
    options |= _credentials(user)
    hosts: tuple[tuple[str, int], ...] = ()
    name = ""
    if kind == "socket":
        name = path
        if places or not path.strip("/"):
            raise ValueError("unix:// is followed by the whole path of the socket, as in unix:///run/valkey.sock")
    else:
        hosts = tuple(_host(place, _PORTS[kind]) for place in (places or "localhost").split(","))
        if kind == "server" and len(hosts) > 1:
            raise ValueError("redis:// takes one host; several are for redis+sentinel:// and redis+cluster://")
        name = _database(path, kind, options)
    if kind != "server" and kind != "socket" and not places:
        raise ValueError(f"{scheme}:// is followed by host:port, with commas between several")
    asking = {option: value for option, value in options.items() if option.startswith("ssl")}
    for option in ("username", "password"):
        if f"sentinel_{option}" in options:
            asking[option] = options.pop(f"sentinel_{option}")
    return RedisUrl(kind, hosts, name, options, asking)


def _split(rest: str) -> tuple[str, str, str]:
    """Return what names user and hosts, the path, and the query."""
    found = re.fullmatch(r"(?P<authority>[^/?#]*)(?P<path>[^?#@]*)(\?(?P<query>[^#@]*))?", rest)
    if found is None:
        raise ValueError(
            "the URL has a # in it, or an @ behind its first / or ?; in user, password, path and options these characters are "
            "written as / %2F, ? %3F, # %23, @ %40, : %3A, % %25"
        )
    return found["authority"], unquote(found["path"]), found["query"] or ""


def _credentials(user: str) -> dict[str, str]:
    name, _, password = user.partition(":")
    return {option: unquote(value) for option, value in (("username", name), ("password", password)) if value}


def _host(text: str, default_port: int) -> tuple[str, int]:
    # The text is not shown: it may be a user and a password whose host was forgotten.
    found = re.fullmatch(r"(?:\[(?P<six>[0-9A-Fa-f:.]+(?:%\w+)?)\]|(?P<name>[^\[\]:\s]+))(?::(?P<port>\d{1,5}))?", text)
    port = int(found["port"] or default_port) if found else 0
    if found is None or not 1 <= port <= 65535:
        raise ValueError("what names a host must be host, host:port or [IPv6 address]:port, with a port in 1..65535")
    return found["six"] or found["name"], port


def _database(path: str, kind: str, options: dict[str, Any]) -> str:
    """Read the path into `options`; returns the service of a sentinel URL."""
    name, database = "", path.strip("/")
    if kind == "sentinel":
        name, _, database = database.partition("/")
        if not name:
            raise ValueError("a sentinel URL ends with the name of the service, as in redis+sentinel://host:26379/mymaster")
    if database:
        if not re.fullmatch("[0-9]{1,9}", database):
            raise ValueError(f"the database in the path of the URL must be a number, not {database!r}")
        options.setdefault("db", int(database))
    if kind == "cluster" and options.pop("db", 0):
        raise ValueError("a cluster has no database but 0; leave it out of the URL")
    return name


def _query(query: str, kind: str, tls: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"ssl": True} if tls else {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name not in _OPTIONS:
            raise ValueError(f"the URL of Redis has an unknown option {name!r}; known are {', '.join(_OPTIONS)}")
        if name.startswith("ssl") and not tls:
            raise ValueError(f"{name} is for TLS, which a URL that starts with rediss asks for")
        if name.startswith("sentinel") and kind != "sentinel":
            raise ValueError(f"{name} is for redis+sentinel:// and rediss+sentinel://")
        try:
            options[name] = _OPTIONS[name](text)
        except ValueError as error:
            raise ValueError(f"the option {name} in the URL of Redis {error}") from None
    return options
