"""Evidence can be replayed by a third party, and shows nothing if it has been changed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from lies_kit import train, with_liar
from typer.testing import CliRunner

from kits.liars import Liar, Lie
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.cli import app
from swarm_plugins.errors import CheckpointError, ProtocolError
from swarm_plugins.transport.identity import new_identity
from swarm_plugins.verification import Quarantine
from swarm_plugins.verification.evidence import Evidence, read_evidence
from swarm_plugins.verification.local_blocks import LocalBlocks
from swarm_plugins.verification.replay import replay


@pytest.mark.parametrize("lie", ["stale_adapter", "flipped_gradients"])
def test_a_third_party_comes_to_the_same_verdict(llama: Path, cache: Path, lie: Lie) -> None:
    with with_liar(llama, Liar(lie)) as swarm:
        train(swarm, steps=2)
    ((peer, caught),) = Quarantine(cache / "quarantine").peers().items()
    found = read_evidence(Path(caught.evidence))
    assert (found.peer, found.reason) == (peer, caught.reason)
    blocks = LocalBlocks(lambda: Checkpoint.open(llama), limit_bytes=0)
    verdicts = asyncio.run(replay(found, blocks))
    assert any(verdict.is_wrong for verdict in verdicts)

    def check(changed: Evidence, message: str) -> None:
        with pytest.raises(ProtocolError, match=message):
            asyncio.run(replay(changed, blocks))

    check(msgspec.structs.replace(found, peer=new_identity().peer_id), "a key of another peer")
    check(msgspec.structs.replace(found, answer=found.request), "holds a ForwardRequest")
    check(msgspec.structs.replace(found, adapters=()), "other adapters")
    changed = bytearray(found.answer)
    changed[-100] ^= 1
    check(msgspec.structs.replace(found, answer=bytes(changed)), "something other than its answer")


def test_damaged_evidence_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.evidence"
    for content in (b"", b"\x00" * 100, b"\x91" * 1000):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="not readable evidence"):
            read_evidence(path)


def test_swarm_audit_lists_replays_and_forgives(llama: Path, mixtral: Path, cache: Path) -> None:
    def audit(*arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(app, ["audit", *arguments])
        assert result.exit_code == code, result.output
        return result.output

    assert "No server is in quarantine" in audit()
    assert "is not in quarantine" in audit("QmNobody", code=2)
    with with_liar(llama, Liar("echo")) as swarm:
        train(swarm, steps=1)
        peer = swarm.peers[1]
    assert f"{peer} quarantined until" in audit()
    assert "replay it with" in audit(peer)
    assert "WRONG: error of the median token 1" in audit(peer, "--model", str(llama))
    assert "the evidence is about" in audit(peer, "--model", str(mixtral), code=2)
    (file,) = (cache / "evidence").iterdir()
    assert f"signed by {peer}: yes" in audit(str(file), "--model", str(llama))
    assert "may be used again" in audit(peer, "--forgive")
    assert "No server is in quarantine" in audit()
