"""A disk that is full, as the kernel says it: one sentence, and nothing half-written is left."""

from __future__ import annotations

import contextlib
import logging
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swarm_plugins.checkpoint.files import Piece
from swarm_plugins.checkpoint.range_cache import RangeCache
from swarm_plugins.errors import ConfigError
from swarm_plugins.hub.folder import write_folder
from swarm_plugins.kept_files import write_whole
from swarm_plugins.offload import quantize_checkpoint
from swarm_plugins.server.state.points import Points
from swarm_plugins.testing import save_tiny
from swarm_plugins.transport.identity import create_identity_file
from swarm_plugins.verification import Quarantine
from swarm_plugins.verification.evidence import Evidence, save_evidence

ROOM_BYTES = 16
"""Less than any of the files below takes, so that each is cut in the middle."""


@contextlib.contextmanager
def full_disk(room_bytes: int = ROOM_BYTES) -> Iterator[None]:
    """No file of this process can grow beyond a size: a write comes back short, the next one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def a_file(folder: Path) -> None:
    write_whole(folder / "file", b"x" * 1000)


def evidence(folder: Path) -> None:
    save_evidence(folder, Evidence(peer="Qm", model="m", reason="bad", at=0.0, adapters=(b"x" * 1000,)))


def an_adapter(folder: Path) -> None:
    write_folder(folder / "adapter", lambda part: (part / "weights").write_bytes(b"x" * 1000))


@pytest.mark.parametrize("write", [a_file, evidence, an_adapter])
def test_what_cannot_be_written_is_an_error_and_leaves_nothing(tmp_path: Path, write: Callable[[Path], None]) -> None:
    with full_disk(), pytest.raises(OSError, match="File too large"):
        write(tmp_path)
    assert files(tmp_path) == {}
    write(tmp_path)
    before = files(tmp_path)
    with full_disk(), pytest.raises(OSError, match="File too large"):
        write(tmp_path)
    assert files(tmp_path) == before


def test_half_of_a_key_is_not_left_behind(tmp_path: Path) -> None:
    with full_disk(), pytest.raises(ConfigError, match=r"cannot write a new identity to .*File too large"):
        create_identity_file(tmp_path / "key")
    create_identity_file(tmp_path / "key")


def test_a_server_goes_on_with_points_that_cannot_be_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    points = Points(tmp_path / "points.json")
    points.earned("Qm", 5)
    with full_disk():
        points.save()
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        f"cannot save the points in {tmp_path / 'points.json'}"
    ]
    assert files(tmp_path) == {}
    points.save()
    again = Points(tmp_path / "points.json")
    again.load()
    assert again.is_known("Qm")


def test_a_liar_stays_excluded_although_the_list_cannot_be_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quarantine = Quarantine(tmp_path)
    with full_disk():
        quarantine.add("Qm", model="m", reason="bad")
    assert "cannot save the quarantine of Qm" in caplog.text
    assert "Qm" in quarantine
    assert files(tmp_path) == {}


def test_downloads_that_cannot_be_kept_are_not_half_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    cache, buffer = RangeCache(tmp_path), bytearray(1000)
    with full_disk():
        cache.save("f", Piece(0, memoryview(buffer)))
        cache.save_head("f", b"x" * 100, 1000)
    assert len([record for record in caplog.records if "are not kept" in record.getMessage()]) == 1
    assert not cache.has("f", 0, 1000)
    assert files(tmp_path) == {}


def test_a_model_that_cannot_be_quantized_to_the_end_is_none(tmp_path: Path) -> None:
    source = save_tiny("mixtral", tmp_path / "model")
    for room_bytes in (1000, 40_000):
        with full_disk(room_bytes), pytest.raises(OSError, match="File too large"):
            quantize_checkpoint(source, tmp_path / "small", expert_bits=8, progress=False)
        assert {path.name for path in tmp_path.iterdir()} <= {"model", ".small.lock"}
