"""Evidence can be replayed by a third party, and shows nothing if it has been changed."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from lies_kit import train, with_liar
from torch import Tensor
from typer.testing import CliRunner

from kits.liars import Liar, Lie
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.cli import app
from swarm_plugins.errors import CapacityError, CheckpointError, ProtocolError
from swarm_plugins.local_hub import LocalHub
from swarm_plugins.transport.identity import new_identity
from swarm_plugins.transport.messages import BackwardRequest, BackwardResponse, ForwardRequest, ForwardResponse
from swarm_plugins.transport.receipts import Signer
from swarm_plugins.transport.wire import encode
from swarm_plugins.verification import Quarantine
from swarm_plugins.verification.claims import Claim
from swarm_plugins.verification.evidence import Evidence, read_evidence
from swarm_plugins.verification.local_blocks import Kind, LocalBlocks
from swarm_plugins.verification.replay import _check_belongs, replay
from swarm_plugins.versions import ModelVersion


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


@pytest.mark.parametrize("at", [float("nan"), float("inf"), 1e300, -1.0])
def test_evidence_of_an_impossible_time_is_refused(tmp_path: Path, at: float) -> None:
    path = tmp_path / "x.evidence"
    path.write_bytes(msgspec.msgpack.encode(Evidence(peer="x", model="m", reason="bad", at=at, adapters=())))
    with pytest.raises(CheckpointError, match=r"not readable evidence \(it is of the time"):
        read_evidence(path)


def test_no_terminal_acts_on_what_evidence_says(llama: Path, tmp_path: Path) -> None:
    text = f"\x1b]0;owned\x07\r\nWRONG {Checkpoint.open(llama).version}"
    path = tmp_path / "x.evidence"
    for model in (text, "another\x1b[2J\x9b2J"):
        path.write_bytes(msgspec.msgpack.encode(Evidence(peer=text, model=model, reason=text, at=1e9, adapters=())))
        result = CliRunner().invoke(app, ["audit", str(path), "--model", str(llama)], color=True)
        assert result.exit_code in (1, 2)
        assert "owned" in result.output
        assert all(char.isprintable() or char == "\n" for char in result.output)
        assert not any(line.startswith("WRONG") for line in result.output.splitlines())


def signed(version: ModelVersion, output: Tensor, **request_changes: Any) -> Evidence:
    """Evidence of what a server has answered to five tokens of zeros, and signed."""
    liar = new_identity()
    fields = {"version": version.key, "start": 0, "end": 4, "hidden": torch.zeros(1, 5, 32), "nonce": b"x" * 16}
    request = ForwardRequest(**(fields | request_changes))
    answer, _ = Signer(liar, version.key, "float32", "none").sign(request, ForwardResponse(hidden=output), b"")
    return Evidence(
        peer=liar.peer_id,
        model=str(version),
        reason="bad",
        at=1e9,
        adapters=(),
        request=b"".join(encode(request)),
        answer=b"".join(encode(answer)),
    )


@pytest.mark.parametrize(
    ("request_changes", "output"),
    [
        pytest.param({"start": 3, "end": 3}, (1, 5, 32), id="no-block"),
        pytest.param({"prefix": (torch.zeros(1),) * 8}, (1, 5, 32), id="prefix"),
        pytest.param({"attention_mask": torch.ones(1, 5)}, (1, 5, 32), id="mask"),
        pytest.param({}, (2, 3, 4), id="output"),
    ],
)
def test_evidence_of_tensors_that_do_not_fit_shows_nothing(
    llama: Path, request_changes: dict[str, Any], output: tuple[int, ...]
) -> None:
    checkpoint = Checkpoint.open(llama)
    evidence = signed(checkpoint.version, torch.zeros(output), **request_changes)
    with pytest.raises(ProtocolError, match="the evidence shows nothing: it cannot be replayed"):
        asyncio.run(replay(evidence, LocalBlocks(lambda: checkpoint, limit_bytes=0)))


def test_evidence_is_replayed_with_the_commit_that_it_is_about(
    llama: Path, mixtral: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalHub() as hub:
        commit = hub.add("org/llama", llama)
        hub.add("org/llama", mixtral)
        here = functools.partial(Checkpoint.open, endpoint=hub.endpoint, cache_dir=tmp_path / "hub")
        monkeypatch.setattr(Checkpoint, "open", here)
        file = tmp_path / "x.evidence"
        file.write_bytes(msgspec.msgpack.encode(signed(ModelVersion("org/llama", commit), torch.ones(1, 5, 32))))
        result = CliRunner().invoke(app, ["audit", str(file), "--model", "org/llama"])
    assert "WRONG" in result.output


def test_a_backward_that_brought_its_forward_along_belongs_to_it_however_it_travelled() -> None:
    hidden = torch.randn(1, 40, 32, generator=torch.Generator().manual_seed(0))
    forward = ForwardRequest(version="v", start=0, end=2, hidden=hidden, keep=True, reply_codec="rotated8")
    again = msgspec.structs.replace(forward, keep=False, reply_codec="none")
    backward = BackwardRequest(forward=again, grad_hidden=hidden)
    outputs = ForwardResponse(hidden=hidden)
    pair = backward, BackwardResponse(grad_hidden=hidden)
    claim = Claim(peer="p", kind=Kind("float32", "none"), forward=forward, outputs=outputs, backward=pair).as_sent()
    assert claim.backward is not None
    assert claim.forward.hidden.equal(hidden)
    _check_belongs(claim.forward, claim.outputs, claim.backward[0])


def test_too_little_memory_clears_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_room(blocks: LocalBlocks) -> list[Any]:
        raise MemoryError("out of memory")

    monkeypatch.setattr("swarm_plugins.verification.replay.checked", lambda evidence: no_room)
    with pytest.raises(CapacityError, match="too little memory to replay the evidence"):
        asyncio.run(replay(cast(Any, None), cast(Any, None)))


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
    for words in ((str(file),), (peer, "--model", str(llama))):
        assert "--forgive takes the id of a peer alone" in audit(*words, "--forgive", code=2)
    assert "may be used again" in audit(peer, "--forgive")
    assert "No server is in quarantine" in audit()


@pytest.mark.parametrize("end", [1 << 60, 5])
def test_blocks_that_the_model_does_not_have_are_refused_at_once(llama: Path, end: int) -> None:
    blocks = LocalBlocks(lambda: Checkpoint.open(llama), limit_bytes=0)
    with pytest.raises(ProtocolError, match=f"blocks 2:{end} are to be computed, the model has 0:4"):
        asyncio.run(blocks.tied_inside(range(2, end)))
