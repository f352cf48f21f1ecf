"""Deadlines learnt from each server's pace: hangs are noticed within seconds, slow servers are waited for."""

from __future__ import annotations

from swarm_plugins.recent import Recent

SLACK_S = 2.5
"""Added to every deadline: a long request of another client may be running."""
_FIRST_SLACK_S = 5.0
"""The same for the first request of its kind: a server may be loading."""
_FIRST_UNIT_S = 0.005
"""A generous pace, for work not observed yet."""
_FIRST_FACTOR = 4.0
"""A server may be slower by this factor than it announces."""
_MAX_ANNOUNCED_S = 30.0
"""No server gets more time for what it announces: it may lie."""
_PATIENCE = 3.0
"""Factor of an unobserved server's deadline after each one that it has missed."""
_FACTOR = 10.0
"""A server slower than this many times its own average counts as hung."""
_SMOOTHING = 0.2
"""Weight of the newest observation when the pace falls."""


class Deadlines:
    """Learns the pace of servers."""

    def __init__(self, longest_s: float, *, slack_s: float = SLACK_S) -> None:
        self.longest_s = longest_s
        """Upper bound of all deadlines."""
        self.slack_s = slack_s
        """Added to the deadlines of servers whose pace is known."""
        self._token_s: Recent[tuple[str, str], float] = Recent()
        self._missed: Recent[tuple[str, str], int] = Recent()
        self._announced: Recent[str, tuple[float, float]] = Recent()

    def timeout_s(self, peer: str, rpc: str, tokens: int) -> float:
        """Returns how long to wait for the answer to a request of ``tokens`` tokens (or other units)."""
        pace = self._token_s.get((peer, rpc))
        if pace is not None:
            return min(_FACTOR * pace * tokens + self.slack_s, self.longest_s)
        first_s = _FIRST_SLACK_S + self.usual_s(peer, rpc, tokens)
        return min(first_s * _PATIENCE ** min(self._missed.get((peer, rpc), 0), 32), self.longest_s)

    def usual_s(self, peer: str, rpc: str, tokens: int) -> float:
        """Returns how long the answer takes as a rule; of a peer whose pace is not known, a generous guess."""
        pace = self._token_s.get((peer, rpc))
        if pace is not None:
            return pace * tokens
        step_s, token_s = self._announced.get(peer, (0.0, 0.0))
        announced_s = min(_FIRST_FACTOR * max(step_s, token_s * tokens), _MAX_ANNOUNCED_S)
        return max(announced_s, _FIRST_UNIT_S * tokens)

    def announce(self, peer: str, *, step_s: float, token_s: float) -> None:
        """Notes what a server says of its speed: seconds of the smallest request, and of each token of a large one."""
        self._announced[peer] = (step_s, token_s)

    def observe(self, peer: str, rpc: str, tokens: int, seconds: float) -> None:
        """Records how long an answer took."""
        token_s = seconds / max(tokens, 1)
        known = self._token_s.get((peer, rpc), 0.0)
        # Tokens of a large request are cheaper: the pace rises at once and falls slowly, so that the single token
        # after a long prefill still gets a fitting deadline.
        self._token_s[peer, rpc] = token_s if token_s > known else known + _SMOOTHING * (token_s - known)
        self._missed.pop((peer, rpc), None)

    def missed(self, peer: str, rpc: str) -> None:
        """Records that no answer came in time: if the server proves to be alive, it gets more time."""
        self._missed[peer, rpc] = self._missed.get((peer, rpc), 0) + 1
