"""From a URL to a client of Redis or Valkey: one server, a primary found by Sentinel, or a cluster."""

import itertools
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.client import PubSub
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ClusterError, RedisClusterException, RedisError

from leases.url import RedisUrl, parse


@dataclass(frozen=True, slots=True)
class Connected:
    """A client, where it goes (never with the password), and how to close it."""

    client: Any  # Redis or RedisCluster: they share the commands, not a class
    where: str
    aclose: Callable[[], Awaitable[None]]


def connect(url: str, timeout_s: float) -> Connected:
    """Return a client that connects on first use. All it raises then are RedisErrors and OSErrors.

    Args:
        url: see `leases.url`.
        timeout_s: what the caller allows for one call, and bounds itself. Connecting takes half of it at most, and only where
            somebody else can be asked (sentinels, a cluster) does the client give up an answer earlier. Only the cluster's
            client tries again, once, with what it has learned since.

    Raises:
        ValueError: the URL is none that `leases.url` knows; the message says what is wrong with it.
    """
    target = parse(url)
    if target.kind == "cluster":
        cluster = _Cluster(target, _patience(timeout_s / 4, timeout_s / 4, retries=1))
        return Connected(cluster, target.where, cluster.aclose)
    patience = _patience(timeout_s / 2, None)
    if target.kind == "sentinel":
        return _sentinel(target, patience, timeout_s)
    place: dict[str, Any] = {"unix_socket_path": target.name}
    if target.kind == "server":
        [(host, port)] = target.hosts
        place = {"host": host, "port": port}
    client = Redis(**place, **patience, **target.options)
    return Connected(client, target.where, client.aclose)


def _patience(connect_s: float, answer_s: float | None, *, retries: int = 0) -> dict[str, Any]:
    return {
        "decode_responses": True,
        "driver_info": None,  # or it tells each server its version, which is one more right to allow from Redis 7.2 on
        "socket_connect_timeout": connect_s,
        "socket_timeout": answer_s,
        "retry": Retry(NoBackoff(), retries),
    }


def _sentinel(target: RedisUrl, patience: Mapping[str, Any], timeout_s: float) -> Connected:
    # Together they take half of the time at most, so that those that are gone do not hide the one that answers.
    once_s = timeout_s / 2 / len(target.hosts)
    asking = {**_patience(once_s, once_s), **target.asking}
    sentinel = Sentinel(target.hosts, sentinel_kwargs=asking)  # type: ignore[no-untyped-call]
    client = sentinel.master_for(target.name, **patience, **target.options)

    async def aclose() -> None:
        await client.aclose()
        for one in sentinel.sentinels:
            await one.aclose()

    return Connected(client, target.where, aclose)


class _KeyFirst:
    """Where a command's key stands, for the client that must know which node to ask.

    It would ask the first primary, with COMMAND, and be of no use for any pool while that node is away.
    """

    async def initialize(self, node: ClusterNode) -> None:
        """Nothing: the lease table's commands are known, and the client looks into EVAL and EVALSHA itself."""

    async def get_keys(self, *words: Any) -> Sequence[Any]:
        return words[1:2]


class _Cluster(RedisCluster):
    """A cluster's client that raises RedisErrors alone, finds a cluster that moved, and subscribes at any node that lives."""

    def __init__(self, target: RedisUrl, patience: Mapping[str, Any]) -> None:
        self._hosts = target.hosts
        self._at_one_node = {**patience, **target.options}
        self._turn = itertools.count(random.randrange(1 << 16))  # gateways that begin together spread
        nodes = [ClusterNode(host, port) for host, port in target.hosts]
        super().__init__(startup_nodes=nodes, **self._at_one_node)
        self.commands_parser = _KeyFirst()  # type: ignore[assignment]

    async def initialize(self, *args: Any, **kwargs: Any) -> RedisCluster:
        try:
            return await super().initialize(*args, **kwargs)
        except RedisClusterException:
            # The addresses that the nodes told may all be old, as when everything was restarted under other addresses: next
            # time those of the URL are asked as well.
            for host, port in self._hosts:
                node = ClusterNode(host, port, **self.connection_kwargs)
                self.nodes_manager.startup_nodes.setdefault(node.name, node)
            raise

    async def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        try:
            await self.initialize()  # redis-py 8.1 sends a new client's first command to any node
            return await super().execute_command(*args, **kwargs)
        except RedisClusterException as error:  # which is no RedisError
            raise ClusterError(_reason(error)) from error
        except AttributeError as error:
            if error.obj is not None:
                raise
            # redis-py 8.1, redirected by ASK to a node that it has not heard of
            raise ClusterError("a slot is on its way to a new node") from error

    def pubsub(self, **kwargs: Any) -> PubSub:  # type: ignore[override]
        """Return a subscription at the next node, for every node hears what is published at any.

        The client's own goes to the node that has the channel's hash slot, whether it lives or not.
        """
        nodes = [(node.host, node.port) for node in self.get_nodes()] or self._hosts
        host, port = nodes[next(self._turn) % len(nodes)]
        return Redis(host=host, port=int(port), **self._at_one_node).pubsub(**kwargs)


def _reason(error: BaseException) -> str:
    """What redis-py says, and what it had heard: it takes any refusal for "cluster mode is not enabled"."""
    heard: BaseException | None = error
    while heard is not None and not isinstance(heard, RedisError):
        heard = heard.__cause__ or heard.__context__
    return str(error) if heard is None or str(heard) in str(error) else f"{error} ({heard})"
