"""`--offload fast=4GB,ram=16GB`: read, refused and written back."""

from __future__ import annotations

import pytest

from swarm_plugins.errors import ConfigError
from swarm_plugins.offload import OffloadConfig
from swarm_plugins.offload.text import format_offload, parse_offload


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("", OffloadConfig(), id="empty"),
        pytest.param("fast=4GB", OffloadConfig(fast_bytes=4 * 10**9), id="one"),
        pytest.param(
            " fast=1GiB , ram=16GB,bits=4,other-bits=8,prefetch=off,readers=3,",
            OffloadConfig(
                fast_bytes=2**30,
                ram_bytes=16 * 10**9,
                expert_bits=4,
                other_bits=8,
                prefetch=False,
                num_readers=3,
            ),
            id="all",
        ),
        pytest.param("prefetch=on", OffloadConfig(prefetch=True), id="on"),
    ],
)
def test_the_option_is_read(text: str, expected: OffloadConfig) -> None:
    assert parse_offload(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(
            "fats=4GB",
            "'fats=4GB': expected NAME=VALUE with a name out of fast, ram, bits",
            id="unknown",
        ),
        pytest.param("4GB", "invalid --offload '4GB': expected NAME=VALUE with a name out of fast", id="no-name"),
        pytest.param("fast=lots", "invalid --offload fast=lots: invalid size 'lots'", id="size"),
        pytest.param("fast=1GB,fast=2GB", "gives fast twice", id="twice"),
        pytest.param("bits=four", "invalid --offload bits=four: expected 2, 3, 4, 8", id="no-width"),
        pytest.param("bits=5", "invalid --offload bits=5: expected 2, 3, 4, 8, 16, nf4, 2dq, 3dq or 4dq", id="width"),
        pytest.param("other-bits=6", "invalid --offload other-bits=6: expected 2, 3, 4, 8", id="other-width"),
        pytest.param("prefetch=maybe", "invalid --offload prefetch=maybe: expected on or off", id="prefetch"),
        pytest.param("readers=0", "num_readers is 0", id="readers"),
    ],
)
def test_a_wrong_option_is_one_sentence(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_offload(text)


@pytest.mark.parametrize(
    "config",
    [
        OffloadConfig(),
        OffloadConfig(fast_bytes=123 * 10**6, ram_bytes=7 * 10**9, expert_bits=3, other_bits=4),
        OffloadConfig(expert_bits="nf4", other_bits="nf4"),
        OffloadConfig(expert_bits="2dq", other_bits="3dq"),
        OffloadConfig(num_readers=4),
        OffloadConfig(fast_bytes=999, prefetch=False),
        OffloadConfig(prefetch=True),
    ],
)
def test_what_is_written_is_read_as_the_same(config: OffloadConfig) -> None:
    assert parse_offload(format_offload(config)) == config


def test_sizes_are_written_rounded_down_to_megabytes() -> None:
    assert format_offload(OffloadConfig(fast_bytes=1_999_999)) == "fast=1MB"
