from typing import Any

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


def test_what_vllm_was_told_is_told_the_gateway_in_flags() -> None:
    settings = GatewaySettings.load(secret="s" * 16)
    assert (settings.tools, settings.reasoning) == ("plain", "none")
    assert not settings.force_include_usage
    assert not settings.return_tokens_as_token_ids
    told = GatewaySettings.load(secret="s" * 16, tools="derender", reasoning="plain", force_include_usage=True)
    assert (told.tools, told.reasoning, told.force_include_usage) == ("derender", "plain", True)


@pytest.mark.parametrize("setting", ["tools", "reasoning"])
def test_a_way_to_serve_parsed_answers_that_there_is_not_is_refused_by_name(setting: str) -> None:
    values: dict[str, Any] = {"secret": "s" * 16, setting: "both"}
    with pytest.raises(ConfigError, match=f"--{setting}"):
        GatewaySettings.load(**values)
