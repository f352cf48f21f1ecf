"""Small files that outlive the process."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm_plugins.kept_files import put_aside, write_whole


def test_the_last_three_damaged_files_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    names = []
    for number in range(6):
        path.write_text(f"damaged {number}")
        names.append(put_aside(path).name)
    assert names[:3] == ["list.json.damaged", "list.json.damaged1", "list.json.damaged2"]
    assert sorted(file.read_text() for file in tmp_path.iterdir()) == [f"damaged {number}" for number in (3, 4, 5)]


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "list.json"
    write_whole(path, b"old")
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    with pytest.raises(TypeError):
        write_whole(path, "text")  # type: ignore[arg-type]
    (tmp_path / "folder" / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        write_whole(tmp_path / "folder" / "taken", b"new")
    assert sorted(file.name for file in path.parent.iterdir()) == ["list.json", "taken"]
    assert path.read_bytes() == b"new"
