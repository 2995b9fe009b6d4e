"""What all tests share: a busy machine is no reason for a property to fail, and one valkey-server is enough for most."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.kit.valkey import ValkeyProcess

settings.register_profile("anchorleg", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("anchorleg")


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyProcess]:
    with ValkeyProcess(tmp_path_factory.mktemp("valkey")) as process:
        yield process
