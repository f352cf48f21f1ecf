"""Addresses of peers: libp2p's multiaddresses, such as ``/ip4/1.2.3.4/tcp/31337/p2p/12D3Koo...``.

hivemind can read them too, but importing it takes seconds, and a command checks its addresses first.
See https://github.com/libp2p/specs/blob/master/addressing/README.md.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import base58

from swarm_plugins.errors import ConfigError

_MAX_INLINE_BYTES = 42


def check_address(address: str) -> None:
    """Raises ConfigError if a text is not an address."""
    _parts(address)


def peer_id_in(address: str) -> str:
    """Returns the peer id (base58) that an address ends with.

    Raises:
        ConfigError: If it is not an address, or has no peer id.
    """
    name, value = _parts(address)[-1]
    if name != "p2p":
        raise ConfigError(
            f"peer address {address!r} has no peer id: expected /ip4/1.2.3.4/tcp/31337/p2p/12D3Koo..., as "
            "`swarm serve` prints it"
        )
    return value  # of a relayed address, the peer behind the relay


def place_in(address: str) -> str:
    """Returns an address without the id of the peer there."""
    parts = _parts(address)
    return _joined(parts[:-1] if parts[-1][0] == "p2p" else parts)


def with_port(host: str, listening: Sequence[str]) -> str:
    """Returns an address to listen on with the port, if it names none, that a node ``listening`` there got."""
    parts = _parts(host)
    for kind in ("tcp", "udp"):
        if (kind, "0") not in parts:
            continue
        for one in map(_parts, listening):
            got = dict(one)
            if kind in got and one[0][0] == parts[0][0] and "p2p-circuit" not in got:
                return _joined((name, got[kind] if (name, value) == (kind, "0") else value) for name, value in parts)
    return host


def check_peer_ids(peers: Iterable[str]) -> None:
    """Raises ConfigError if one of some peers is not a peer id."""
    for peer in peers:
        try:
            _peer_id(peer)
        except (ValueError, TypeError, AttributeError) as exc:
            raise ConfigError(
                f"{peer!r} is not a peer id: expected 12D3Koo... or Qm..., as `swarm status` shows"
            ) from exc


def _parts(address: str) -> list[tuple[str, str]]:
    """Returns the protocols of an address, each with its value; empty for one that takes none."""
    try:
        parts = list(_read(address))
        if not parts:
            raise ValueError("it is empty")
    except (ValueError, TypeError, AttributeError) as exc:
        raise ConfigError(
            f"{address!r} is not a libp2p address ({exc}): expected /ip4/1.2.3.4/tcp/31337, for a peer with /p2p/ID"
        ) from exc
    return parts


def _read(address: str) -> Iterator[tuple[str, str]]:
    if not address.startswith("/"):
        raise ValueError("it does not begin with /")
    words = iter(address.rstrip("/").split("/")[1:])
    for name in words:
        if name in _FLAGS:
            yield name, ""
        elif name in _READERS:
            value = next(words, None)
            if value is None:
                raise ValueError(f"{name} has no value")
            yield ("p2p" if name == "ipfs" else name), _READERS[name](value)
        else:
            raise ValueError(f"unknown protocol {name!r}")


def _joined(parts: Iterable[tuple[str, str]]) -> str:
    return "".join(f"/{name}/{value}" if value else f"/{name}" for name, value in parts)


def _ip6(text: str) -> str:
    if "%" in text:
        raise ValueError(f"zone in {text!r}: give it as /ip6zone/ZONE/ip6/...")
    return str(ipaddress.IPv6Address(text))


def _word(text: str) -> str:
    if not re.fullmatch(r"[\w.-]+", text):
        raise ValueError(f"invalid name {text!r}")
    return text


def _port(text: str) -> str:
    if not (text.isascii() and text.isdecimal() and int(text) <= 0xFFFF):
        raise ValueError(f"invalid port {text!r}: expected 0 to 65535")
    return str(int(text))


def _peer_id(text: str) -> str:
    """Returns a peer id, which is a hash of a public key, or a short key itself, in base58."""
    content = base58.b58decode(text)
    is_hash = content[:2] == b"\x12\x20" and len(content) == 34
    is_key = content[:1] == b"\x00" and 2 < len(content) <= _MAX_INLINE_BYTES + 2 and content[1] == len(content) - 2
    if not (is_hash or is_key):
        raise ValueError(f"invalid peer id {text!r}")
    return text


_READERS: Mapping[str, Callable[[str], str]] = {
    "ip4": lambda text: str(ipaddress.IPv4Address(text)),
    "ip6": _ip6,
    "ip6zone": _word,
    "dns": _word,
    "dns4": _word,
    "dns6": _word,
    "dnsaddr": _word,
    "tcp": _port,
    "udp": _port,
    "p2p": _peer_id,
    "ipfs": _peer_id,
}
_FLAGS = frozenset({"quic", "quic-v1", "tls", "ws", "wss", "http", "https", "p2p-circuit"})
