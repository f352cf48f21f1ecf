"""The secret of a private swarm: its file, and proofs that are of no use to others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.utils.multiaddr import Multiaddr

from swarm_plugins.errors import ConfigError, TransportError
from swarm_plugins.transport.admission import gate as gate_module
from swarm_plugins.transport.admission.gate import Gate, load_secret

SECRET = b"correct horse battery staple"


def write(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_secret_is_read_without_blanks_around_it(tmp_path: Path) -> None:
    assert load_secret(write(tmp_path / "s", b"  " + SECRET + b"\n")) == SECRET


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        pytest.param(b"", 0o600, r"secret .*/s is empty: write one into it, such as with openssl", id="empty"),
        pytest.param(b" \n", 0o600, "is empty", id="blank"),
        pytest.param(SECRET, 0o644, r"open to other users of this machine \(mode 0644\): run chmod 600 ", id="open"),
        pytest.param(b"short", 0o600, "has 5 bytes: expected 16 to 4096", id="short"),
        pytest.param(bytes([65]) * 5000, 0o600, "has too many bytes: expected 16 to 4096", id="long"),
        pytest.param(None, 0, "cannot read secret .*: No such file or directory", id="missing"),
    ],
)
def test_a_secret_that_cannot_be_used_is_one_sentence(
    tmp_path: Path, content: bytes | None, mode: int, message: str
) -> None:
    path = tmp_path / "s"
    if content is not None:
        write(path, content, mode)
    with pytest.raises(ConfigError, match=message) as caught:
        load_secret(path)
    assert "\n" not in str(caught.value)


class Wire:
    """Joins two gates by streams in memory, and keeps what was said."""

    def __init__(self, caller: str, answerer: Gate, address: str = "/ip4/203.0.113.7/tcp/1") -> None:
        self.caller, self.answerer, self.address = caller, answerer, address
        self.said: list[bytes] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def open(self, peer: str, protocol: str) -> Any:
        here, there = asyncio.StreamReader(), asyncio.StreamReader()
        info = SimpleNamespace(peer_id=SimpleNamespace(to_base58=lambda: self.caller), addr=Multiaddr(self.address))
        self.tasks.append(asyncio.create_task(self.answerer.answer(info, there, self._writer(here))))  # type: ignore[arg-type]
        return here, self._writer(there)

    def _writer(self, reader: asyncio.StreamReader) -> Any:
        async def drain() -> None: ...

        def write(data: bytes) -> None:
            self.said.append(data)
            reader.feed_data(data)

        return SimpleNamespace(write=write, drain=drain, close=reader.feed_eof)


def gate_of(peer: str) -> Gate:
    return Gate(peer, pytest.fail, secret=SECRET)


async def test_both_sides_prove_the_secret_once() -> None:
    theirs = gate_of("b")
    assert "has not proved" in str(theirs.refusal("a"))
    wire = Wire("a", theirs)
    ours = Gate("a", wire.open, secret=SECRET)
    await ours.enter("b", 5.0)
    assert [len(part) for part in wire.said] == [32] * 4
    assert len(set(wire.said)) == 4
    assert theirs.refusal("a") is None
    assert ours.refusal("b") is None
    assert ours.refusal("c") is not None
    await ours.enter("b", 5.0)
    assert len(wire.said) == 4, "a fresh proof is not repeated"
    ours.forget("b")
    await ours.enter("b", 5.0)
    assert len(wire.said) == 8


async def test_calls_that_begin_at_once_share_one_proof() -> None:
    wire = Wire("a", gate_of("b"))
    ours = Gate("a", wire.open, secret=SECRET)
    await asyncio.gather(*(ours.enter("b", 5.0) for _ in range(9)))
    assert len(wire.said) == 4
    assert wire.answerer.refusal("a") is None


async def test_a_gate_takes_over_the_proofs_of_the_one_before() -> None:
    theirs = gate_of("b")
    await Gate("a", Wire("a", theirs).open, secret=SECRET).enter("b", 5.0)
    successor, of_another_secret = gate_of("b"), Gate("b", pytest.fail, secret=SECRET + b"!")
    for gate in (successor, of_another_secret):
        gate.take_over(theirs)
    assert successor.refusal("a") is None
    assert of_another_secret.refusal("a") is not None


@pytest.mark.parametrize("address", ["/ip4/203.0.113.7/tcp/1", "/ip4/198.51.100.1/tcp/1"], ids=["same", "other"])
async def test_silent_strangers_keep_no_member_out(address: str) -> None:
    theirs = gate_of("b")
    strangers = [Wire(f"s{number}", theirs) for number in range(100)]
    for wire in strangers:
        for _ in range(4):
            await wire.open("b", "")
        await asyncio.sleep(0)
    wire = Wire("a", theirs, address)
    await Gate("a", wire.open, secret=SECRET).enter("b", 5.0)
    assert theirs.refusal("a") is None
    waiting = [task for one in strangers for task in one.tasks if not task.done()]
    assert len(waiting) == 256 - 1, "the oldest proofs of the crowd are given up"
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)


async def test_a_proof_is_of_no_use_to_another_peer_or_at_another_time() -> None:
    wire = Wire("a", gate_of("b"))
    await Gate("a", wire.open, secret=SECRET).enter("b", 5.0)
    nonce, _, proof, answer = wire.said
    for caller in ("a", "mallory"):
        again = gate_of("b")
        replay = Wire(caller, again)
        reader, writer = await replay.open("b", "")
        writer.write(nonce)
        await reader.readexactly(32)
        writer.write(proof)
        assert await reader.read() == b""
        assert again.refusal(caller) is not None
    # Nor can the answer be sent back as a proof, by one who pretends to be the answerer.
    for guess in (proof, answer):
        reader = asyncio.StreamReader()
        reader.feed_data(bytes(32) + guess)
        sink = SimpleNamespace(write=lambda _: None, close=lambda: None)

        async def impostor(_: str, __: str, reader: Any = reader, sink: Any = sink) -> Any:
            return reader, sink

        ours = Gate("a", impostor, secret=SECRET)
        with pytest.raises(TransportError, match="does not belong to this private swarm"):
            await ours.enter("b", 5.0)
        assert ours.refusal("b") is not None


async def test_another_secret_proves_nothing() -> None:
    theirs = gate_of("b")
    wire = Wire("a", theirs)
    with pytest.raises(TransportError, match="does not belong to this private swarm"):
        await Gate("a", wire.open, secret=SECRET + b"!").enter("b", 5.0)
    assert len(wire.said) == 3, "the answerer says nothing that depends on the secret"
    assert theirs.refusal("a") is not None


async def test_a_list_of_peers_holds_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate("a", pytest.fail, allowed=["b"])
    assert gate.refusal("b") is None
    assert str(gate.refusal("c")).startswith("not admitted: peer c is not among the allowed peers of a: ask its")
    await gate.enter("b", 5.0)
    with pytest.raises(TransportError, match="peer c is not among the allowed peers"):
        await gate.enter("c", 5.0)
    monkeypatch.setattr(gate_module, "_MAX_PROVEN", 3)
    full = gate_of("a")
    for index in range(9):
        full._note(f"peer {index}")
    assert len(full._proven) == 3


async def test_a_stranger_cannot_keep_others_from_proving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "_PROOF_TIMEOUT_S", 0.3)
    theirs = gate_of("b")
    silent = Wire("stranger", theirs)
    for _ in range(300):
        await silent.open("b", "")
    await asyncio.sleep(0)
    assert len(theirs._answering) == 4
    await Gate("a", Wire("a", theirs).open, secret=SECRET).enter("b", 5.0)
    await asyncio.gather(*silent.tasks)
    assert not theirs._answering
