"""Honest peers agree on one value in each round, and go on, whatever fewer than half as many hostile ones tell each."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from swarm_plugins.together.agreement import Agreement
from swarm_plugins.transport.run_messages import Mark, Votes

VIEW_S, MOST_VIEW_S, TICK_S, LIMIT_S = 5.0, 600.0, 1.0, 20_000.0


class Simulation:
    """One round: honest peers hear each other now and then, hostile ones tell each what they like."""

    def __init__(self, num_honest: int, num_hostile: int, seed: int, lie: Lie) -> None:
        self.random = random.Random(seed)
        self.honest = [f"honest {seed} {number}" for number in range(num_honest)]
        self.hostile = [f"hostile {seed} {number}" for number in range(num_hostile)]
        self.agreements = {peer: Agreement(b"", peer, view_s=VIEW_S, most_view_s=MOST_VIEW_S) for peer in self.honest}
        self.lie = lie
        self.seen: dict[str, dict[str, Votes]] = {peer: {} for peer in self.honest}
        self.gone: dict[str, dict[str, bytes]] = {peer: {} for peer in self.honest}
        self.decided: dict[str, bytes] = {}
        self.proposed: dict[tuple[str, int], bytes] = {}
        self.heard: dict[str, dict[tuple[str, int], bytes]] = {peer: {} for peer in self.honest}
        self.now = 0.0
        chance = self.random.choice((0.1, 0.5, 0.9))
        self.is_heard = lambda: self.random.random() < chance
        self.sees = {
            peer: [one for one in self.hostile if self.random.random() < self.random.choice((0.5, 1.0))]
            for peer in self.honest
        }
        self.here_at: dict[tuple[str, bytes], float] = {}
        self.fair: dict[tuple[str, bytes], bool] = {}

    def run(self) -> None:
        while len(self.decided) < len(self.honest) and self.now < LIMIT_S:
            for peer in self.random.sample(self.honest, len(self.honest)):
                if peer not in self.decided:
                    self._hear(peer)
                    self._advance(peer)
            self.now += TICK_S

    def _hear(self, peer: str) -> None:
        for other in self.honest:
            if other != peer and self.is_heard():
                self.seen[peer][other] = self.agreements[other].votes
                self.heard[peer].update({key: value for key, value in self.proposed.items() if key[0] == other})
                if other in self.decided:
                    self.gone[peer][other] = self.decided[other]
        for other in self.sees[peer]:
            told = self.lie(self, other, peer)
            self.gone[peer].pop(other, None)
            if isinstance(told, Votes):
                self.seen[peer][other] = told
            else:
                self.gone[peer][other] = told

    def _advance(self, peer: str) -> None:
        agreement = self.agreements[peer]
        members = [*(one for one in self.honest if one != peer), *self.sees[peer]]
        others = {one: self.seen[peer].get(one, Votes()) for one in members}
        agreement.hear(others, self.gone[peer])
        proposer, view = agreement.proposer, agreement.votes.view
        if proposer == peer:
            own = agreement.preferred() or f"of {peer}".encode()
            self.proposed.setdefault((peer, view), own)
            proposal = self.proposed[peer, view]
        elif proposer in self.hostile:
            to_all = f"hostile {view}".encode()
            proposal = (popular(self, peer), half(self, peer), to_all, to_all)[
                random.Random(f"{proposer} {view}").randrange(4)
            ]
        else:
            proposal = self.gone[peer].get(proposer) or self.heard[peer].get((proposer, view))
        done = agreement.advance(
            self.now,
            proposal=proposal,
            approves=lambda value: self._approves(peer, value),
            is_due=True,
        )
        if done is not None:
            self.decided[peer] = done

    def _approves(self, peer: str, value: bytes) -> bool:
        """A value is here after a while; of hostile ones a part is fair in the eyes of a part."""
        here_at = self.here_at.setdefault((peer, value), self.now + self.random.choice((0.0, 0.0, 1.0, 8.0)))
        is_fair = self.fair.setdefault((peer, value), value.startswith(b"of") or self.random.random() < 0.5)
        return self.now >= here_at and (is_fair or self.agreements[peer].is_vouched(value))


Lie = Callable[[Simulation, str, str], "Votes | bytes"]


def half(now: Simulation, to: str) -> bytes:
    return f"hostile {now.honest.index(to) % 2}".encode()


def popular(now: Simulation, to: str) -> bytes:
    """Returns what the receiver has voted for, or else most have."""
    own = now.agreements[to].votes
    marks = [own.lock, own.prevote, *(one.votes.prevote for one in now.agreements.values())]
    return next((mark.value for mark in marks if mark), half(now, to))


def all_for(value: bytes, view: int) -> Votes:
    mark = Mark(view, value)
    return Votes(view=view, prevote=mark, keys=(mark,), lock=mark)


def silence(now: Simulation, of: str, to: str) -> Votes:
    return Votes()


def two_faces(now: Simulation, of: str, to: str) -> Votes:
    return all_for(half(now, to), now.agreements[to].votes.view)


def claims_to_have_gone_on(now: Simulation, of: str, to: str) -> bytes:
    return half(now, to)


def flattery(now: Simulation, of: str, to: str) -> Votes:
    """Votes with each receiver, so that it locks on what others do not."""
    return all_for(popular(now, to), now.agreements[to].votes.view)


def one_victim_a_view(now: Simulation, of: str, to: str) -> Votes:
    """Lets one peer lock in each view, and shows the others no vote."""
    view = now.agreements[to].votes.view
    is_victim = now.honest[view % len(now.honest)] == to
    prevotes = Counter(one.votes.prevote for one in now.agreements.values() if one.votes.prevote)
    best = max((mark for mark in prevotes if mark.view == view), key=lambda mark: prevotes[mark], default=None)
    return all_for(best.value, view) if is_victim and best else Votes(view=view)


def one_goes_on_and_the_others_are_turned(now: Simulation, of: str, to: str) -> Votes:
    """Lets one peer decide; from then on votes for anything else."""
    decided = set(now.decided.values())
    if not decided:
        return one_victim_a_view(now, of, to)
    view = now.agreements[to].votes.view
    marks = [one.votes.prevote for one in now.agreements.values() if one.votes.prevote]
    others = [mark.value for mark in marks if mark.view == view and mark.value not in decided]
    return all_for(others[0] if others else half(now, to), view)


def votes_in_the_last_moment(now: Simulation, of: str, to: str) -> Votes:
    agreement = now.agreements[to]
    is_late = agreement._since is not None and now.now - agreement._since > VIEW_S * 0.8
    return flattery(now, of, to) if is_late else Votes(view=agreement.votes.view)


def later_views(now: Simulation, of: str, to: str) -> Votes:
    return all_for(half(now, to), now.agreements[to].votes.view + now.random.choice((1, 2, 1 << 50)))


def junk(now: Simulation, of: str, to: str) -> Votes | bytes:
    random_ = now.random
    value = random_.choice([*now.proposed.values(), b"hostile 0", b"hostile 1"])
    mark = Mark(random_.randrange(now.agreements[to].votes.view + 3), value)
    votes = Votes(view=mark.view, prevote=mark, keys=(mark, Mark(mark.view + 1, value)), lock=mark)
    return random_.choice((votes, value, Votes()))


LIES = (
    silence,
    two_faces,
    claims_to_have_gone_on,
    flattery,
    one_victim_a_view,
    one_goes_on_and_the_others_are_turned,
    votes_in_the_last_moment,
    later_views,
    junk,
)


def anything(now: Simulation, of: str, to: str) -> Votes | bytes:
    return now.random.choice(LIES)(now, of, to)


SIZES = [(honest, hostile) for honest in range(2, 13) for hostile in range((honest + 1) // 2)]


@pytest.mark.parametrize(
    "seeds",
    [range(1), pytest.param(range(1, 5), marks=pytest.mark.slow), pytest.param(range(5, 40), marks=pytest.mark.hours)],
    ids=["one", "some", "many"],
)
@pytest.mark.parametrize(("num_honest", "num_hostile"), SIZES)
def test_honest_peers_decide_the_same_and_go_on(num_honest: int, num_hostile: int, seeds: range) -> None:
    for lie in (*LIES, anything) if num_hostile else (silence,):
        for seed in seeds:
            now = Simulation(num_honest, num_hostile, 1000 * seed + len(lie.__name__), lie)
            now.run()
            assert len(set(now.decided.values())) == 1, f"{lie.__name__}, seed {seed}: {now.decided}"
            assert len(now.decided) == num_honest, f"{lie.__name__}, seed {seed}: {now.decided}"


def voted(one: Agreement, others: dict[str, Votes], proposal: bytes) -> Votes:
    one.hear(others, {})
    one.advance(0.0, proposal=proposal, approves=lambda _: True, is_due=True)
    return one.votes


def test_a_locked_peer_prevotes_another_value_only_after_keys_of_a_later_view() -> None:
    one = Agreement(b"", "me", view_s=VIEW_S, most_view_s=VIEW_S)
    first, second = Mark(0, b"first"), Mark(1, b"second")
    keys_only = {peer: Votes(view=0, keys=(first,)) for peer in "abcd"}
    assert voted(one, keys_only, b"first").lock == first
    in_view_2 = {peer: Votes(view=2, keys=(first,)) for peer in "abcd"}
    assert voted(one, in_view_2, b"second").prevote == Mark(0, b"first")
    both = Votes(view=2, keys=(first, second))
    few = in_view_2 | dict.fromkeys("ab", both)
    # Two of five are more than a third: the key is named as well, and with three it is no quorum yet.
    assert voted(one, few, b"second").prevote == Mark(0, b"first")
    assert one.votes.keys == (first, second)
    enough = in_view_2 | dict.fromkeys("abc", both)
    voted(one, enough, b"second")
    assert voted(one, enough, b"second").prevote == Mark(2, b"second")
    # It is not locked on what it had no part in.
    assert one.votes.lock == first


def test_a_lock_of_which_new_members_do_not_know_does_not_bind() -> None:
    one = Agreement(b"", "me", view_s=VIEW_S, most_view_s=VIEW_S)
    first = Mark(0, b"first")
    assert voted(one, {"liar": Votes(view=0, keys=(first,))}, b"first").lock == first
    unaware = {peer: Votes(view=1) for peer in ("liar", "b", "c")}
    assert voted(one, unaware, b"second").prevote == Mark(1, b"second")


def test_a_peer_goes_back_to_the_view_of_those_that_join_it() -> None:
    one = Agreement(b"", "me", view_s=VIEW_S, most_view_s=VIEW_S)
    far = {"liar": Votes(view=(1 << 53) - 2)}
    assert voted(one, far, b"first").view > 9
    joined = {peer: Votes() for peer in ("liar", "b", "c")}
    assert voted(one, joined, b"second").prevote == Mark(0, b"second")
    # Only once, and nobody calls it where messages have no numbers.
    for _ in range(100):
        voted(one, joined | {"b": far["liar"], "c": far["liar"]}, b"second")
    assert 1 << 20 < one.votes.view < 1 << 53


def test_a_peer_alone_decides_at_once() -> None:
    alone = Agreement(b"", "me", view_s=VIEW_S, most_view_s=VIEW_S)
    done = alone.advance(0.0, proposal=b"v", approves=lambda _: True, is_due=True)
    assert done == b"v"
