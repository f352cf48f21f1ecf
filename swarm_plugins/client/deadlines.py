"""Deadlines learnt from each server's pace: hangs are noticed within seconds, slow servers are waited for."""

from __future__ import annotations

SLACK_S = 2.5
"""Added to every deadline: a long request of another client may be running."""
_FACTOR = 10.0
"""A server slower than this many times its own average counts as hung."""
_SMOOTHING = 0.2
"""Weight of the newest observation when the pace falls."""
_MAX_PACES = 4096
"""Paces remembered; the one known for longest is forgotten first."""


class Deadlines:
    """Learns the pace of servers."""

    def __init__(self, longest_s: float, *, slack_s: float = SLACK_S) -> None:
        self.longest_s = longest_s
        """Deadline for work not observed yet, and upper bound of all others."""
        self.slack_s = slack_s
        """Added to every other deadline."""
        self._token_s: dict[tuple[str, str], float] = {}

    def timeout_s(self, peer: str, rpc: str, tokens: int) -> float:
        """Returns how long to wait for the answer to a request of ``tokens`` tokens (or other units)."""
        pace = self._token_s.get((peer, rpc))
        return self.longest_s if pace is None else min(_FACTOR * pace * tokens + self.slack_s, self.longest_s)

    def observe(self, peer: str, rpc: str, tokens: int, seconds: float) -> None:
        """Records how long an answer took."""
        token_s = seconds / max(tokens, 1)
        known = self._token_s.get((peer, rpc), 0.0)
        # Tokens of a large request are cheaper: the pace rises at once and falls slowly, so that the single token
        # after a long prefill still gets a fitting deadline.
        self._token_s[peer, rpc] = token_s if token_s > known else known + _SMOOTHING * (token_s - known)
        if len(self._token_s) > _MAX_PACES:
            del self._token_s[next(iter(self._token_s))]
