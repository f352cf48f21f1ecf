"""Shares of a resource: one peer alone gets its share, many leave something for the next."""

from __future__ import annotations

from typing import NoReturn

import pytest

from swarm_plugins.errors import CapacityError, ConfigError
from swarm_plugins.ledger import BusyError, Ledger


def filled(ledger: Ledger, peer: str) -> int:
    """Lets a peer take all it gets, and returns how much that is."""
    while room := ledger.room(peer):
        ledger.claim(peer, room)
    return ledger.held(peer)


@pytest.mark.parametrize(
    ("share", "peers", "free"),
    [(0.5, 1, 600), (0.5, 2, 400), (0.5, 5, 200), (0.75, 1, 300), (0.25, 3, 600), (1.0, 1, 0)],
)
def test_peers_that_take_all_they_get_leave_something_free(share: float, peers: int, free: int) -> None:
    ledger = Ledger(1200, max_peer_share=share)
    for _ in range(20):  # peers that come later press the others down as they give back
        for peer in range(peers):
            ledger.release(str(peer), ledger.held(str(peer)))
            filled(ledger, str(peer))
    assert abs(ledger.limit - ledger.used - free) <= 2 * peers


def test_a_peer_alone_gets_its_share_to_the_last_byte() -> None:
    ledger = Ledger(1000, max_peer_share=0.5)
    assert filled(ledger, "a") == ledger.most_of_peer == 500
    with pytest.raises(BusyError, match=r"holds 500 bytes here and all hold 500 of 1000: .* no room for 1 "):
        ledger.claim("a", 1)
    assert ledger.room("b") == 250


def test_what_never_fits_is_told_from_what_does_not_fit_now() -> None:
    ledger = Ledger(1000, max_peer_share=0.5)
    with pytest.raises(CapacityError, match="501 bytes are asked, one client can hold 500 here") as refusal:
        ledger.claim("a", 501)
    assert not isinstance(refusal.value, BusyError)
    assert ledger.used == 0


def test_the_first_of_a_kind_is_granted_while_any_is_free() -> None:
    streams = Ledger(8, max_peer_share=0.25, noun="streams")
    for peer in range(8):
        streams.claim(str(peer), 1)
    with pytest.raises(BusyError, match="all hold 8 of 8"):
        streams.claim("late", 1)


class OfAddress:
    """Peers named ADDRESS/N share their address; "friend" is known."""

    def calling(self, peer: str, address: str) -> NoReturn:
        raise NotImplementedError

    def group(self, peer: str) -> str:
        return peer.partition("/")[0]

    def is_known(self, peer: str) -> bool:
        return peer == "friend"


@pytest.mark.parametrize(("share", "of_address"), [(0.25, 500), (0.5, 750), (0.75, 900)])
def test_many_identities_of_one_address_hold_what_three_peers_could(share: float, of_address: int) -> None:
    ledger = Ledger(1000, max_peer_share=share, groups=OfAddress())
    assert sum(filled(ledger, f"sybil/{number}") for number in range(200)) == of_address
    assert ledger.room("sybil/new") == 0
    with pytest.raises(BusyError, match=f"holds 0 bytes here, those of its address {of_address} and all hold"):
        ledger.claim("sybil/new", 1)
    assert ledger.room("honest/0") == pytest.approx((1000 - of_address) * share, abs=1)
    for number in range(200):
        ledger.release(f"sybil/{number}", ledger.held(f"sybil/{number}"))
    assert ledger.room("sybil/new") == 1000 * share


def test_a_peer_leaves_the_group_that_its_claims_were_counted_for() -> None:
    groups = OfAddress()
    ledger = Ledger(1000, groups=groups)
    ledger.claim("a/1", 100)
    groups.group = lambda peer: peer  # type: ignore[method-assign]  # it has earned points meanwhile
    ledger.claim("a/1", 100)
    ledger.release("a/1", 200)
    assert (ledger.used, ledger.held("a/1"), ledger._held_by_group, ledger._group_of) == (0, 0, {}, {})


def test_what_is_reserved_goes_to_known_peers() -> None:
    streams = Ledger(16, max_peer_share=0.25, groups=OfAddress(), reserved=2)
    for number in range(14):
        streams.claim(f"address {number}", 1)
    assert streams.room("newcomer") == 0
    assert streams.room("friend") == 1


def test_what_others_would_give_up_is_room_only_beyond_the_reserve() -> None:
    streams = Ledger(16, max_peer_share=0.25, groups=OfAddress(), reserved=2)
    for number in range(14):
        streams.claim(f"address {number}", 1)
    assert streams.room_after("newcomer", "address 3", 1) == 1
    streams.claim("friend", 1)
    assert streams.room_after("newcomer", "address 3", 1) == 0
    assert streams.room_after("newcomer", "address 3", 2) == 1


def test_a_charge_releases_what_it_claimed() -> None:
    ledger = Ledger(1000)
    with ledger.charge("a") as charge:
        charge.claim(100)
        charge.cover(80)
        charge.cover(150)
        assert ledger.held("a") == 150
        charge.keep_only(20)
        assert ledger.used == 20
    assert ledger.used == 0


@pytest.mark.parametrize(
    "settings", [{"limit": 0}, {"limit": 1, "max_peer_share": 0}, {"limit": 1, "max_peer_share": 2}]
)
def test_wrong_settings_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        Ledger(**settings)  # type: ignore[arg-type]
