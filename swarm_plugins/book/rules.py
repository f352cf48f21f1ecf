"""All constants by which peers are judged, in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How peers are judged; seconds unless the name says otherwise."""

    # How long an answer is waited for.
    longest_s: float = 120.0
    """Upper bound of all deadlines."""
    slack_s: float = 2.5
    """Added to the deadline of a peer whose pace is known: a long request of another client may be running."""
    first_slack_s: float = 5.0
    """The same for the first request of its kind: a server may be loading."""
    first_unit_s: float = 0.005
    """A generous time for one token (or other unit) of work that was not observed yet."""
    first_factor: float = 4.0
    """A server may be slower by this factor than it announces."""
    max_announced_s: float = 30.0
    """No server gets more time for what it announces: it may lie."""
    patience: float = 3.0
    """Factor of an unobserved peer's deadline after each one that it has missed."""
    hung_factor: float = 10.0
    """A peer slower than this many times its own average counts as hung."""
    smoothing: float = 0.2
    """Weight of the newest observation when a pace falls."""

    # Whether a peer that has not answered is at work.
    late_s: float = 3.0
    """A peer that has not answered by then is asked whether it is at work, and again every `ask_again_s`."""
    ask_again_s: float = 2.0
    sign_of_life_s: float = 2.0
    """How long it has to answer that. With the two above: servers that hang are given up within 8 s."""
    slow_link_bytes_per_s: float = 125_000.0
    """1 Mbit/s: its answer may be queued behind a large request, and the answer to that."""

    # When a replica is asked too (Dean & Barroso 2013, "The Tail at Scale").
    usual_share: float = 0.95
    """A request is late after what this share of the requests alike took."""
    min_alike: int = 8
    """Requests of about the same size that make a distribution."""
    hedge_slack_s: float = 0.02
    """Added to what requests take as a rule: a shorter delay is not worth a request."""
    hedge_share: float = 0.05
    """Further requests for each request."""
    hedge_burst: float = 4.0
    """Most further requests that are saved up."""

    # What a server's work costs.
    min_calls: int = 3
    """Own requests after which a server's announced figures no longer count."""
    kept_samples: int = 32
    """Requests of each kind that are remembered."""
    recent_samples: int = 8
    """Requests whose median is a server's pace."""
    step_tokens: int = 16
    """A request of at most so many tokens is a step: its time hardly depends on their number."""
    clamp: float = 0.25
    """A server is believed to need this share of the time of the fastest one seen, not less."""
    busiest: float = 0.9
    """Announced loads above this count as this."""
    fresh_s: float = 60.0
    fade_s: float = 600.0
    """What was seen longer ago than `fresh_s` loses half its weight in this time: a busy server gets another chance."""

    # When a session moves to a faster server.
    kept_steps: int = 32
    """Steps of a session that are remembered."""
    compared_steps: int = 4
    """Steps after which servers are compared, and whose median counts."""
    clearly_faster: float = 2.0
    move_noise_s: float = 0.01
    """A session moves to a server that is faster by this factor and more."""
    move_s: float = 0.2
    """Time of a move that does not depend on its length."""

    # How far a peer is.
    far_s: float = 0.003
    """Round trip from which packing tensors, and having servers push to each other, saves more than it costs: nearer
    servers are in the same network, or on the same machine."""

    # Who is asked.
    remembered_s: float = 600.0
    """A server is asked for this long after its last answer, also if the directory does not name it."""

    # Bans.
    first_ban_s: float = 2.0
    max_ban_s: float = 300.0
    """A ban lasts twice as long each time."""
    first_pause_s: float = 0.25
    longest_pause_s: float = 2.0
    """Pauses before a banned peer is asked for what no other peer has."""

    # Servers that push to each other.
    first_rest_s: float = 60.0
    max_rest_s: float = 3600.0
    """How long two servers are not asked to push after that was in vain; twice as long each time."""
    push_patience_s: float = 2.0
    """An answer may be later than usual by this and by the time its input travels. Then the client sends that."""
    push_bytes_per_s: float = 1_250_000.0
    """10 Mbit/s: the rate at which an input travels from server to server, or the client's is there sooner."""
    push_share: float = 0.5
    """Share of an answer's deadline after which the client sends the input in any case."""

    # Holders of experts.
    lag_recovery: float = 0.8
    """Factor by which a holder's lag falls at most with each answer."""
    lag_half_life_s: float = 15.0
    """A slow holder is hardly asked meanwhile, so its lag fades by itself."""
    holder_late_s: float = 0.25
    holder_late_factor: float = 4.0
    """A holder is late after this many times the expected seconds and `holder_late_s`: a replica is asked too."""

    # Spot checks.
    first_checks: int = 4
    most_first_checks: int = 256
    """Upper limit of ``first_checks`` after failed checks, each of which doubles it. Twice as many passed checks reset
    it."""
    least_checked: float = 0.02
    """Share of a server's calls that are checked however long it has been honest."""
    uncheckable_s: float = 60.0
    """Pause after an answer could not be checked."""
