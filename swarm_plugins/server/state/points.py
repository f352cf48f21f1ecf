"""Points: what other identities have computed for this server, and this server for them (Petals, section 4).

The figures are this server's own: nothing that a peer claims counts. Who has served gets a larger share of the turns,
up to ``_MAX_WEIGHT`` times a newcomer's. An identity costs nothing, so those without points share one newcomer's
turns, and a part of the memory, with all others of their address. Peers of one relay have its address.

Work is counted in tokens times blocks, what this server does in how many of them it could have done in that time. It
counts half after a week.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from swarm_plugins.errors import one_line
from swarm_plugins.kept_files import put_aside, write_whole
from swarm_plugins.transport.admission.addresses import host_of

log = logging.getLogger(__name__)

_MAX_PEERS = 10_000
_MAX_WEIGHT = 4.0
_PRIOR = 100_000.0
"""Work for this server that earns half of what can be earned, from a peer that asks for nothing."""
_HALF_LIFE_S = 7 * 86_400.0
_SHOWN = 5
"""Accounts in a summary."""


class _Account(msgspec.Struct):
    earned: float = 0.0
    """Work the peer has done for this server."""
    served: float = 0.0
    """Work this server has done for the peer."""
    at: float = 0.0
    """When both were last brought up to date."""


class _File(msgspec.Struct):
    version: int
    peers: dict[str, _Account]


class Points:
    """A server's accounts of other identities.

    Args:
        path: File that keeps them across restarts. None: they end with the process.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._accounts: dict[str, _Account] = {}
        self._lock = threading.Lock()
        """The event loop and the compute thread both add accounts, and drop others."""
        self._hosts: dict[str, str] = {}
        self._calling: Counter[str] = Counter()
        """Open streams of each peer."""
        self._has_changed = False

    def load(self) -> None:
        """Reads the file, if there is one. A damaged file is kept under another name, and the accounts start anew."""
        file = self.path
        if file is None:
            return
        try:
            found = msgspec.json.decode(file.read_bytes(), type=_File)
            accounts = found.peers
            if found.version != 1 or not all(_is_sound(account) for account in accounts.values()):
                raise ValueError(f"version {found.version} or figures that cannot be")
        except FileNotFoundError:
            return
        except OSError as error:
            self._do_not_keep(file, error)
            return
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            try:
                aside = put_aside(file)
            except OSError as refusal:
                self._do_not_keep(file, refusal)
            else:
                log.warning(
                    "the points in %s cannot be read (%s): kept as %s, and started anew", file, one_line(error), aside
                )
            return
        self._accounts = dict(list(accounts.items())[:_MAX_PEERS])

    def _do_not_keep(self, file: Path, error: OSError) -> None:
        self.path = None
        log.warning("the points in %s cannot be read (%s): those of this run are not kept", file, one_line(error))

    def save(self) -> None:
        """Writes the file if something has changed; a failure is logged, and tried again the next time."""
        if self.path is None or not self._has_changed:
            return
        self._has_changed = False
        try:
            write_whole(self.path, msgspec.json.encode(_File(version=1, peers=dict(self._accounts))))
        except OSError as error:
            self._has_changed = True
            log.warning("cannot save the points in %s: %s", self.path, one_line(error))

    def met(self, peer: str, address: str) -> None:
        """Notes the address that a peer calls from."""
        host = host_in(address)
        self._hosts.pop(peer, None)
        if host:
            self._hosts[peer] = host
        while len(self._hosts) > _MAX_PEERS:
            # Forgotten while it calls, a peer would be a group of its own: any number of them at one address.
            oldest = next((one for one in self._hosts if one not in self._calling), None)
            if oldest is None:
                return
            del self._hosts[oldest]

    @contextlib.contextmanager
    def calling(self, peer: str, address: str) -> Iterator[None]:
        """Notes the address that a peer calls from, and keeps it while the ``with`` block runs."""
        self.met(peer, address)
        self._calling[peer] += 1
        try:
            yield
        finally:
            self._calling[peer] -= 1
            if not self._calling[peer]:
                del self._calling[peer]

    def earned(self, peer: str, work: int) -> None:
        """Notes work that a peer has done for this server."""
        self._account(peer).earned += work
        self._has_changed = True

    def served(self, peer: str, work: float) -> None:
        """Notes work that this server has done for a peer."""
        if peer:
            self._account(peer).served += work
            self._has_changed = True

    def group(self, peer: str) -> str:
        """Returns the group in which a peer shares turns and memory: that of its address for a newcomer."""
        return peer if self.is_known(peer) else self._hosts.get(peer, peer)

    def is_known(self, peer: str) -> bool:
        """Returns whether a peer has done anything for this server."""
        account = self._accounts.get(peer)
        return account is not None and account.earned > 0

    def weight(self, group: str) -> float:
        """Returns the weight of a group: 1 for newcomers, more for those who have served."""
        account = self._accounts.get(group)
        if account is None or not account.earned:
            return 1.0
        return 1.0 + (_MAX_WEIGHT - 1.0) * account.earned / (account.earned + account.served + _PRIOR)

    def rank(self, peer: str) -> float:
        """Returns what a peer has done for this server, and it for the peer: strangers have 0."""
        account = self._accounts.get(peer)
        return 0.0 if account is None else account.earned + account.served

    def summary(self) -> str:
        """Returns in one line what this server's books say of the peers with most work, in tokens times blocks."""
        busiest = sorted(self._accounts.items(), key=lambda pair: -pair[1].earned - pair[1].served)[:_SHOWN]
        parts = [f"{peer} {account.served:.0f} for it, {account.earned:.0f} by it" for peer, account in busiest]
        if not parts:
            return "no peers in this server's books yet"
        return f"{len(self._accounts)} peers in this server's books, tokens times blocks computed: {'; '.join(parts)}"

    def _account(self, peer: str) -> _Account:
        with self._lock:
            return self._known(peer)

    def _known(self, peer: str) -> _Account:
        now = time.time()
        account = self._accounts.get(peer)
        if account is None:
            account = self._accounts[peer] = _Account(at=now)
            if len(self._accounts) > _MAX_PEERS:
                self._forget_one()
        elif now > account.at:
            left = 0.5 ** ((now - account.at) / _HALF_LIFE_S)
            account.earned *= left
            account.served *= left
        account.at = now
        return account

    def _forget_one(self) -> None:
        """Drops the account with least work: first of those that have earned nothing."""
        accounts = self._accounts
        del accounts[min(accounts, key=lambda peer: (accounts[peer].earned, accounts[peer].at))]


def host_in(address: str) -> str:
    """Returns the host in a multiaddress; see `host_of`. Empty if it has none."""
    pairs = itertools.pairwise(address.strip("/").split("/"))
    return next((host_of(value) for kind, value in pairs if kind in ("ip4", "ip6")), "")


def _is_sound(account: _Account) -> bool:
    return all(math.isfinite(value) and value >= 0 for value in (account.earned, account.served, account.at))
