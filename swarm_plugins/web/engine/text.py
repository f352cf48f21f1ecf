"""From tokens to text that will not change any more."""

from __future__ import annotations

from collections.abc import Callable, Sequence

MAX_STOPS = 16
"""Stop texts of a request: all of them are looked at after each token of each answer, while no other one goes on."""
MAX_STOP_CHARS = 200

_HALF_A_CHARACTER = "\ufffd"
_MOST_TOKENS = 4
"""Of one character, which has four bytes at most."""


class TextStream:
    """Decodes tokens as they come; what a later token may change is held back.

    The text of a token depends on the tokens before it (spaces, characters of several bytes), so a short window of them
    is decoded with it.

    Args:
        decode: Returns the text of tokens.
        before: Tokens of the text that this one goes on with.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._tokens = list(before)
        self._start = 0
        self._given = len(self._tokens)

    def add(self, token: int) -> str:
        """Returns the text that became final with this token."""
        self._tokens.append(token)
        now = self._decode(self._tokens[self._start :])
        if now.endswith(_HALF_A_CHARACTER) and len(self._tokens) - self._given < _MOST_TOKENS:
            return ""
        return self._advance(now)

    def end(self) -> str:
        """Returns the rest: bytes that never became a character."""
        return self._advance(self._decode(self._tokens[self._start :]))

    def _advance(self, now: str) -> str:
        before = self._decode(self._tokens[self._start : self._given])
        self._start, self._given = self._given, len(self._tokens)
        return now[len(before) :]


class StopTexts:
    """Ends a text before the first of some stop texts; holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.is_reached = False

    def add(self, text: str) -> str:
        """Returns the text that is certain to come before any stop text."""
        if not self._stops or self.is_reached:
            return "" if self.is_reached else text
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.is_reached = True
            return self._give(min(found))
        return self._give(len(self._held) - self._longest_beginning())

    def end(self) -> str:
        """Returns what was held back: the text ended before the stop text did."""
        return "" if self.is_reached else self._give(len(self._held))

    def _give(self, chars: int) -> str:
        given, self._held = self._held[:chars], self._held[chars:]
        return given

    def _longest_beginning(self) -> int:
        """Returns how many of the last characters may begin a stop text."""
        longest = min(len(self._held), max(map(len, self._stops)) - 1)
        return next(
            (
                chars
                for chars in range(longest, 0, -1)
                if self._held.endswith(tuple(s[:chars] for s in self._stops if len(s) > chars))
            ),
            0,
        )
