"""A peer's libp2p key pair, in a file that the daemon reads too.

The peer id is the public key or its hash, so a signature proves a record's owner without a third party.
See https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shlex
import stat
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import base58
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, padding, rsa
from google.protobuf.message import DecodeError

from swarm_plugins.errors import ConfigError
from swarm_plugins.transport.libp2p import Key

_RSA, _ED25519 = 0, 1
"""Types of keys in libp2p's records."""
_MAX_INLINE_KEY_BYTES = 42
_RSA_BITS = range(2048, 8193)
_RSA_EXPONENT = 65_537
"""The only one in use. Checking a signature takes time by the length of the exponent, which its owner chooses."""


@dataclass(frozen=True)
class Identity:
    """A private key, its public key and its peer id."""

    private_key: ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey
    public_key: bytes
    """In libp2p's encoding."""
    peer_id: str
    """Base58."""
    content: bytes = field(repr=False)
    """Of a file that holds the private key."""

    def sign(self, data: bytes) -> bytes:
        """Returns a signature that [`is_signed_by`][swarm_plugins.transport.identity.is_signed_by] accepts."""
        if isinstance(self.private_key, rsa.RSAPrivateKey):
            return self.private_key.sign(data, padding.PKCS1v15(), hashes.SHA256())
        return self.private_key.sign(data)


def peer_id_of(public_key: bytes) -> str:
    """Returns the peer id (base58) of a public key in libp2p's encoding."""
    if len(public_key) <= _MAX_INLINE_KEY_BYTES:
        multihash = bytes([0x00, len(public_key)]) + public_key
    else:
        multihash = b"\x12\x20" + hashlib.sha256(public_key).digest()
    return base58.b58encode(multihash).decode()


def is_signed_by(public_key: bytes, data: bytes, signature: bytes) -> bool:
    """Returns whether ``signature`` over ``data`` matches a public key in libp2p's encoding."""
    try:
        key_type, content = _read_record(public_key)
        if key_type == _ED25519:
            ed25519.Ed25519PublicKey.from_public_bytes(content).verify(signature, data)
            return True
        if key_type == _RSA:
            key = serialization.load_der_public_key(content)
            if not isinstance(key, rsa.RSAPublicKey) or key.key_size not in _RSA_BITS:
                return False
            if key.public_numbers().e != _RSA_EXPONENT:
                return False
            key.verify(signature, data, padding.PKCS1v15(), hashes.SHA256())
            return True
    except (ValueError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return False


def create_identity_file(path: Path) -> None:
    """Writes a new identity to a file that must not exist yet, readable by its owner only.

    Raises:
        ConfigError: If the file cannot be written.
    """
    write_identity(path, new_identity())


def new_identity() -> Identity:
    """Returns a new Ed25519 identity that lies in no file."""
    key = ed25519.Ed25519PrivateKey.generate()
    public = key.public_key().public_bytes_raw()
    return _identity(key, _ED25519, public, _record(_ED25519, key.private_bytes_raw() + public))


def write_identity(path: Path, identity: Identity) -> None:
    """Writes an identity to a file that must not exist yet, readable by its owner only.

    Raises:
        ConfigError: If the file cannot be written; nothing is left behind.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(identity.content)
        except BaseException:
            # Half of a key would be found at the next start.
            path.unlink()
            raise
    except OSError as exc:
        raise _not_writable(path, exc.strerror) from exc


def _not_writable(path: Path, reason: str | None) -> ConfigError:
    return ConfigError(
        f"cannot write a new identity to {path}: {reason}; give a file in a directory that exists and is writable"
    )


_taken: weakref.WeakSet[IdentityFile] = weakref.WeakSet()


class IdentityFile:
    """The identity of a node, in memory or in a file that is locked against other processes on this machine."""

    def __init__(
        self, identity: Identity, path: Path | None = None, lock: BinaryIO | None = None, *, existed: bool = False
    ) -> None:
        self.identity = identity
        self.path = path
        """None: the identity lies in memory only."""
        self.existed = existed
        """Whether the file was there before, so that another peer may use it too."""
        self._lock = lock
        _taken.add(self)

    @classmethod
    def take(cls, path: Path | None) -> IdentityFile:
        """Opens an identity file, creating it if necessary; None: a new identity in memory.

        Raises:
            ConfigError: If it cannot be read or written, or is in use.
        """
        if path is None:
            return cls(new_identity())
        existed = path.exists()
        if not existed:
            create_identity_file(path)
        identity = load_identity(path)
        lock = path.open("rb")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            lock.close()
            raise ConfigError(
                f"identity {path} ({identity.peer_id}) is in use by another node on this machine: give each node its "
                "own file"
            ) from exc
        return cls(identity, path, lock, existed=existed)

    def share(self) -> IdentityFile:
        """Returns the same for one more node of this process, which gives it back too."""
        lock = None if self._lock is None else os.fdopen(os.dup(self._lock.fileno()), "rb")
        return IdentityFile(self.identity, self.path, lock, existed=self.existed)

    def give_back(self) -> None:
        """Unlocks the file when no other node shares it. Idempotent."""
        if self._lock is not None:
            self._lock.close()


def _give_back_in_child() -> None:
    # A fork shares the open file and so its lock, which a DataLoader worker would keep held.
    for one in list(_taken):
        one.give_back()


os.register_at_fork(after_in_child=_give_back_in_child)


def load_identity(path: Path) -> Identity:
    """Reads an identity file, written here, by hivemind or by another libp2p program.

    Raises:
        ConfigError: If it cannot be read, is open to other users, or holds no Ed25519 or RSA key.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        content = path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"cannot read identity {path}: {exc.strerror}") from exc
    identity = _decode(path, content)
    if mode & 0o077:
        raise ConfigError(
            f"identity {path} is open to other users of this machine (mode {mode:04o}): whoever has read it can answer "
            f"as this peer. Run chmod 600 {shlex.quote(str(path))}, or use a new key if somebody may have read it"
        )
    return identity


def check_identity(path: Path) -> None:
    """Raises ConfigError if a node could neither use an identity file nor make it."""
    if path.exists():
        load_identity(path)
    elif not path.absolute().parent.is_dir():
        raise _not_writable(path, os.strerror(errno.ENOENT))


def _decode(path: Path, content: bytes) -> Identity:
    try:
        key_type, data = _read_record(content)
        if key_type == _ED25519:
            private = ed25519.Ed25519PrivateKey.from_private_bytes(data[:32])
            return _identity(private, key_type, private.public_key().public_bytes_raw(), content)
        if key_type == _RSA:
            key = serialization.load_der_private_key(data, password=None)
            if isinstance(key, rsa.RSAPrivateKey):
                public = key.public_key()
                der, info = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
                return _identity(key, key_type, public.public_bytes(encoding=der, format=info), content)
    except ValueError as exc:
        raise ConfigError(
            f"{path} is not a libp2p private key ({exc}): name another file, such as one that "
            "`swarm serve --identity FILE` has made"
        ) from exc
    raise ConfigError(f"identity {path} has a key of type {key_type}: expected Ed25519 or RSA")


def _identity(
    key: ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey, key_type: int, public: bytes, content: bytes
) -> Identity:
    encoded = _record(key_type, public)
    return Identity(key, encoded, peer_id_of(encoded), content)


def _record(key_type: int, data: bytes) -> bytes:
    """Returns a key in libp2p's encoding."""
    encoded: bytes = Key(type=key_type, data=data).SerializeToString()
    return encoded


def _read_record(content: bytes) -> tuple[int, bytes]:
    """Returns type and bytes of a key; raises ValueError unless it is written as libp2p's specification demands."""
    try:
        key = Key.FromString(content)
    except DecodeError:
        key = None
    if key is None or _record(key.type, key.data) != content:
        raise ValueError(f"its {len(content)} bytes are not a record of a key")
    return key.type, key.data
