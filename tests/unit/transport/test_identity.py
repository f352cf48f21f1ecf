"""Key files: libp2p's own format, read without hivemind; faults are told with their cure."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from hivemind.proto import crypto_pb2

from swarm_plugins.errors import ConfigError
from swarm_plugins.transport.identity import (
    check_identity,
    create_identity_file,
    is_signed_by,
    load_identity,
    new_identity,
)


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    path.chmod(0o600)
    return path


def rsa_key() -> bytes:
    key = rsa.generate_private_key(public_exponent=65_537, key_size=2048)
    der = key.private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    return bytes(crypto_pb2.PrivateKey(key_type=crypto_pb2.RSA, data=der).SerializeToString())


def test_records_are_those_of_hivemind(tmp_path: Path) -> None:
    create_identity_file(tmp_path / "ours")
    record = crypto_pb2.PrivateKey.FromString((tmp_path / "ours").read_bytes())
    assert (record.key_type, len(record.data)) == (crypto_pb2.Ed25519, 64)
    for path in (tmp_path / "ours", written(tmp_path / "rsa", rsa_key())):
        identity = load_identity(path)
        public = crypto_pb2.PublicKey.FromString(identity.public_key)
        assert public.SerializeToString() == identity.public_key
        assert is_signed_by(identity.public_key, b"data", identity.sign(b"data"))
        assert not is_signed_by(identity.public_key, b"other", identity.sign(b"data"))


def test_a_public_key_has_one_spelling() -> None:
    # The peer id is a hash of it: each spelling would be another peer.
    identity = new_identity()
    key, signature = identity.public_key, identity.sign(b"data")
    for other in (b"", key[:-1], key + b"\x00", key[:3] + b"\xa0\x00" + key[4:], key[2:] + key[:2], key + b"\x18\x01"):
        assert not is_signed_by(other, b"data", signature)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"", r"is not a libp2p private key \(its 0 bytes .*name another file", id="empty"),
        pytest.param(b"no key", r"is not a libp2p private key \(its 6 bytes .*name another file", id="text"),
        pytest.param(b"\x08\x01\x12\x02ab", r"is not a libp2p private key", id="short"),
        pytest.param(b"\x08\x02\x12\x02ab", r"has a key of type 2: expected Ed25519 or RSA", id="other-type"),
    ],
)
def test_a_file_that_is_not_a_key_is_not_to_be_deleted(tmp_path: Path, content: bytes, message: str) -> None:
    # It may be another program's, and `swarm drain` reads the file of a server.
    with pytest.raises(ConfigError, match=message) as caught:
        check_identity(written(tmp_path / "key", content))
    assert "delete" not in str(caught.value)


def test_a_file_that_can_be_made_is_left_to_be_made(tmp_path: Path) -> None:
    check_identity(tmp_path / "key")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=r"cannot write a new identity to .*No such file or directory; give a"):
        check_identity(tmp_path / "none" / "key")
    (tmp_path / "key").touch(0o644)
    with pytest.raises(ConfigError, match=r"is not a libp2p private key"):
        check_identity(tmp_path / "key")
    create_identity_file(tmp_path / "open")
    (tmp_path / "open").chmod(0o644)
    with pytest.raises(ConfigError, match=r"open to other users .*chmod 600 \S+/open"):
        check_identity(tmp_path / "open")
