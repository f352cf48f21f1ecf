"""What a peer keeps of its last contribution, and what becomes of a file that is not as it was written."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_kit import identity_of

from swarm_plugins.together.contributed import Contributed
from swarm_plugins.together.outer import blob_digest
from swarm_plugins.together.signing import Seal, run_hash
from swarm_plugins.transport.run_messages import Contribution

UPDATE = b"update"


def seal_of(number: int = 0, run_id: str = "me/run") -> Seal:
    return Seal(run_hash(run_id), identity_of(number), allowed_peers=None, secret_file=None)


def signed(round_: int, seal: Seal) -> Contribution:
    return seal.contribution(round_=round_, base=b"base", blob=blob_digest(UPDATE), samples=4)


def loaded(identity: Path, seal: Seal) -> Contributed:
    one = Contributed("me/run", seal, identity)
    one.load()
    return one


async def test_the_last_contribution_is_there_after_a_start(tmp_path: Path) -> None:
    seal = seal_of()
    before = loaded(tmp_path / "key", seal)
    for round_ in (3, 4):
        await before.keep(signed(round_, seal), UPDATE)
    kept = loaded(tmp_path / "key", seal).to(4, b"base")
    assert kept is not None
    assert (kept.contribution, kept.update) == (signed(4, seal), UPDATE)
    for round_, base in ((3, b"base"), (5, b"base"), (4, b"other")):
        assert loaded(tmp_path / "key", seal).to(round_, base) is None
    # Each run has its own.
    assert loaded(tmp_path / "key", seal_of(run_id="me/other")).to(4, b"base") is None


@pytest.mark.parametrize("case", ["cut", "junk", "update", "signature", "another key"])
async def test_a_file_that_does_not_hold_is_not_used_and_said(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seal = seal_of()
    await Contributed("me/run", seal, tmp_path / "key").keep(signed(4, seal), UPDATE)
    (path,) = tmp_path.iterdir()
    written = path.read_bytes()
    changed = {
        "cut": written[:-3],
        "junk": b"junk",
        "update": written.replace(b"update\xc4\x06update", b"update\xc4\x06upgrad"),
        "signature": written.replace(b"samples\x04", b"samples\x05"),
    }
    assert changed.get(case) != written
    path.write_bytes(changed.get(case, written))
    assert loaded(tmp_path / "key", seal_of(1 if case == "another key" else 0)).to(4, b"base") is None
    assert f"cannot read this peer's last contribution from {path}" in caplog.text
    assert "use a new one" in caplog.text


async def test_a_file_that_cannot_be_written_is_said_once_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    seal = seal_of()
    one = Contributed("me/run", seal, tmp_path / "file" / "key")
    for round_ in (3, 4):
        await one.keep(signed(round_, seal), UPDATE)
        assert one.to(round_, b"base") is not None
    assert caplog.text.count("cannot keep this peer's last contribution in") == 1


async def test_a_key_that_does_not_last_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seal = seal_of()
    await Contributed("me/run", seal, None).keep(signed(4, seal), UPDATE)
    assert not list(tmp_path.iterdir())
