"""Key files: libp2p's own format, read without hivemind; faults are told with their cure."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from hivemind.p2p import PeerID
from hivemind.proto import crypto_pb2

from swarm_plugins.errors import ConfigError
from swarm_plugins.transport.identity import (
    IdentityFile,
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
    assert identity.peer_id == PeerID.from_identity(path.read_bytes()).to_base58()  # hivemind reads RSA keys only


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


def test_a_valid_signature_of_a_key_with_a_long_exponent_is_refused() -> None:
    """Checking it would take milliseconds, thousands of times in one message."""
    usual = rsa.generate_private_key(public_exponent=65_537, key_size=2048)
    primes = usual.private_numbers()
    order = (primes.p - 1) * (primes.q - 1)
    private = 65_537
    public = pow(private, -1, order)
    numbers = rsa.RSAPrivateNumbers(
        p=primes.p,
        q=primes.q,
        d=private,
        dmp1=private % (primes.p - 1),
        dmq1=private % (primes.q - 1),
        iqmp=primes.iqmp,
        public_numbers=rsa.RSAPublicNumbers(e=public, n=primes.public_numbers.n),
    )
    for key, is_believed in ((usual, True), (numbers.private_key(), False)):
        key.public_key().verify(signature := sign(key), b"data", padding.PKCS1v15(), hashes.SHA256())
        der = key.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
        encoded = crypto_pb2.PublicKey(key_type=crypto_pb2.RSA, data=der).SerializeToString()
        assert is_signed_by(encoded, b"data", signature) is is_believed


def sign(key: rsa.RSAPrivateKey) -> bytes:
    return key.sign(b"data", padding.PKCS1v15(), hashes.SHA256())


def test_a_new_identity_is_private_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "id"
    first = IdentityFile.take(path)
    first.give_back()
    first.give_back()
    assert path.stat().st_mode & 0o077 == 0
    second = IdentityFile.take(path)
    assert second.identity.peer_id == first.identity.peer_id
    second.give_back()


def test_nodes_that_share_an_identity_unlock_it_together(tmp_path: Path) -> None:
    first = IdentityFile.take(tmp_path / "id")
    second = first.share()
    assert second.identity == first.identity
    first.give_back()
    message = f"{first.identity.peer_id}.*in use by another node.*give each node its own file"
    with pytest.raises(ConfigError, match=message):
        IdentityFile.take(tmp_path / "id")
    second.give_back()
    IdentityFile.take(tmp_path / "id").give_back()


def test_an_identity_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "id"
    create_identity_file(path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"id is open to other users .*mode 0640.*Run chmod 600 .*, or use a new"):
        IdentityFile.take(path)
    path.chmod(0o400)
    IdentityFile.take(path).give_back()


def test_an_unusable_identity_says_which_file_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing/id: No such file or directory; give a file in a directory"):
        IdentityFile.take(tmp_path / "missing" / "id")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ConfigError, match=r"text is not a libp2p private key .*name another|text has a key of"):
        IdentityFile.take(tmp_path / "text")
    with pytest.raises(ConfigError, match="cannot read identity"):
        IdentityFile.take(tmp_path)


def test_a_forked_process_keeps_no_identity(tmp_path: Path) -> None:
    taken = IdentityFile.take(tmp_path / "key")
    (begun, begins), (ends, end) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        os.write(begins, b"x")
        os.read(ends, 1)  # until the parent has closed it
        os._exit(0)
    try:
        os.read(begun, 1)
        taken.give_back()
        IdentityFile.take(tmp_path / "key").give_back()
    finally:
        for one in (begun, begins, ends, end):
            os.close(one)
        os.waitpid(child, 0)
