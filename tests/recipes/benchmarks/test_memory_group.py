"""A control group bounds all memory of a process, and leaves nothing behind; without one there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from recipes.benchmarks import memory_group
from recipes.benchmarks.memory_group import MemoryGroup

MB = 1 << 20
TAKE = "import pathlib, sys; pathlib.Path(sys.argv[1], 'cgroup.procs').write_text('0'); bytearray(int(sys.argv[2]))"


def test_a_process_that_takes_more_than_the_limit_is_ended() -> None:
    with MemoryGroup(64 * MB) as group:
        if group.path is None:
            pytest.skip("this user may not make control groups")
        path = group.path
        codes = [
            subprocess.run([sys.executable, "-c", TAKE, str(path), str(size)], check=False, timeout=60).returncode
            for size in (16 * MB, 256 * MB)
        ]
    assert codes == [0, -9]
    assert not path.exists()


def test_where_no_group_can_be_made_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A folder, but no hierarchy of groups; and none at all.
    monkeypatch.setattr(
        memory_group,
        "_PLACES",
        [(folder, "memory.max", "memory.swap.max") for folder in (tmp_path, tmp_path / "missing")],
    )
    with MemoryGroup(MB) as group:
        assert group.path is None
    assert not list(tmp_path.iterdir())
