from __future__ import annotations

import pytest

from swarm_plugins.errors import ConfigError
from swarm_plugins.sizes import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("0", 0), ("1000", 1000), ("512MB", 512_000_000), ("1.5GiB", 3 << 29), (" 2 kib ", 2048), ("3t", 3 * 10**12)],
)
def test_sizes_are_read_as_people_write_them(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "MB", "-1", "1 XB", "1e9", "12 34", pytest.param("9" * 400, id="400-digits")])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"invalid size .*: expected a number of up to 18 digits, or one with B, KB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (512_000_000, "512 MB"), (3.1e12, "3.1 TB"), (999_600, "1 MB")]
)
def test_sizes_are_written_with_a_unit(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text
