"""Wrong settings are refused with the value and what is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from swarm_plugins import SwarmConfig
from swarm_plugins.client import connect
from swarm_plugins.errors import ConfigError


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        pytest.param({"request_timeout_s": 0}, r"request_timeout_s must be a number of seconds above 0, got 0", id="s"),
        pytest.param({"refresh_s": float("nan")}, r"refresh_s must be .* got nan", id="nan"),
        pytest.param({"request_timeout_s": float("inf")}, r"request_timeout_s must be .* got inf", id="endless"),
        pytest.param({"refresh_s": True}, r"refresh_s must be .* got True", id="bool"),
        pytest.param({"identity": 5}, r"identity must be the path of a file, got 5", id="path"),
        pytest.param({"max_retries": -1}, r"max_retries must be a whole number, 0 or more; got -1", id="retries"),
        pytest.param(
            {"codec": "zip"}, r"unknown codec 'zip'; known: none, float16, bfloat16, rotated8, auto", id="codec"
        ),
        pytest.param({"local_blocks": (-1, 0)}, r"invalid local_blocks \(-1, 0\): expected two numbers", id="negative"),
        pytest.param({"local_blocks": 2}, r"invalid local_blocks 2: .* such as \(2, 1\)", id="one"),
        pytest.param({"verify_bytes": "1GB"}, r"verify_bytes must be a whole number, 0 or more; got '1GB'", id="bytes"),
        pytest.param({"local_fallback": "yes"}, r"local_fallback must be True or False, got 'yes'", id="fallback"),
        pytest.param(
            {"allowed_peers": "12D3"}, r"invalid allowed_peers '12D3': expected a list of peer ids", id="text"
        ),
        pytest.param({"allowed_peers": ()}, r"allowed_peers is empty", id="peers"),
    ],
)
def test_wrong_settings_are_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SwarmConfig(**setting)


def test_lists_of_a_yaml_file_are_kept_as_tuples() -> None:
    config = SwarmConfig(allowed_peers=["a", "b"], local_blocks=[2, 1])  # type: ignore[arg-type]
    assert (config.allowed_peers, config.local_blocks) == (("a", "b"), (2, 1))
    assert hash(config)


@pytest.mark.parametrize(
    ("peers", "setting", "message"),
    [
        pytest.param(["nowhere"], {}, "nowhere", id="address"),
        pytest.param([], {"allowed_peers": ["foo"]}, "'foo' is not a peer id", id="peer"),
        pytest.param([], {"secret_file": "/no/such/secret"}, "/no/such/secret", id="secret"),
    ],
)
def test_what_is_needed_to_join_is_checked_before_a_model_is_loaded(
    peers: list[str], setting: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        connect(peers, SwarmConfig(**setting))
