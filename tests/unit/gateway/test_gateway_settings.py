import pytest

from gateway.settings import GatewaySettings
from process.errors import ConfigError


def test_a_redis_url_that_leads_nowhere_is_refused_at_the_start_without_its_password() -> None:
    with pytest.raises(ConfigError) as refused:
        GatewaySettings.load(secret="s" * 16, redis_url="rediss+cluster:/lane:hunter2@redis.test")
    message = str(refused.value)
    assert "--redis-url" in message
    assert "rediss+cluster://" in message
    assert "hunter2" not in message
