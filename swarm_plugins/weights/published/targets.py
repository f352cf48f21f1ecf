"""Regular expressions out of a checkpoint's config, matched in time that no expression can blow up.

Python's ``re`` backtracks: an expression of thirty characters can keep it busy for years. Here an expression becomes a
finite automaton, whose states are made as names need them (Thompson 1968, Regular Expression Search Algorithm).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from swarm_plugins.errors import UnsupportedError

MAX_CHARS = 256
"""Longest expression."""
_MAX_STEPS = 1 << 12
"""Transitions of an automaton: characters after states."""
_MAX_DEPTH = 40
# One character: escaped, of a set, or itself.
_ATOM = re.compile(r"\\[dDwWsS]|\\[^A-Za-z0-9]|\[\^?[^\\\[\]]+\]|[^\\()\[\]{}|*+?^$]")
_ACCEPT = 0

States = frozenset[int]


@dataclass
class _Node:
    """Where an expression goes on."""

    atom: re.Pattern[str] | None = None
    """What the next character must be. None: nothing is taken."""
    anchor: str = ""
    """``^`` or ``$``, if the name must begin or end here."""
    after: list[int] = field(default_factory=list)


class Target:
    """An expression that names modules: characters, sets, groups, ``|``, ``* + ?`` and anchors.

    Raises:
        UnsupportedError: If it is too long, or has anything else.
    """

    def __init__(self, pattern: str) -> None:
        if len(pattern) > MAX_CHARS:
            raise UnsupportedError(
                f"the target {pattern[:MAX_CHARS]!r} is an expression of {len(pattern)} characters, at most "
                f"{MAX_CHARS} are read"
            )
        self._pattern = pattern
        self._nodes = [_Node()]
        self._position = self._depth = 0
        first = self._choice(_ACCEPT)
        if self._position < len(pattern):
            raise self._unknown()
        self._first = self._reached([first], is_start=True)
        self._steps: dict[tuple[States, str], States] = {}

    def matches(self, name: str) -> bool:
        """Returns whether a name begins with a match.

        Raises:
            UnsupportedError: If the automaton gets too large.
        """
        states = self._first
        for char in name:
            if _ACCEPT in states or not states:
                break
            states = self._step(states, char)
        else:
            return _ACCEPT in self._reached(states, is_start=not name, is_end=True)
        return _ACCEPT in states

    def _step(self, states: States, char: str) -> States:
        known = self._steps.get((states, char))
        if known is not None:
            return known
        if len(self._steps) >= _MAX_STEPS:
            raise UnsupportedError(f"the target {self._pattern!r} is too complicated an expression")
        taken = (node for node in map(self._nodes.__getitem__, states) if node.atom and node.atom.fullmatch(char))
        found = self._steps[states, char] = self._reached(one for node in taken for one in node.after)
        return found

    def _reached(self, states: Iterable[int], *, is_start: bool = False, is_end: bool = False) -> States:
        """Returns the states that are reached from some without taking a character."""
        found: set[int] = set()  # of the nodes without a character only those that a name's end may open are kept
        waiting = list(states)
        while waiting:
            index = waiting.pop()
            node = self._nodes[index]
            if index in found:
                continue
            found.add(index)
            is_open = not node.anchor or (is_start if node.anchor == "^" else is_end)
            if node.atom is None and is_open:
                waiting += node.after
        return frozenset(
            one for one in found if one == _ACCEPT or self._nodes[one].atom or self._nodes[one].anchor == "$"
        )

    def _choice(self, after: int) -> int:
        """Reads ``a|b`` and returns where it begins."""
        branches = [self._sequence(after)]
        while self._take("|"):
            branches.append(self._sequence(after))
        return self._add(_Node(after=branches))

    def _sequence(self, after: int) -> int:
        """Reads expressions that follow each other."""
        # Each begins in a node of its own, so that the one before can be told where it goes on.
        first = last = self._add(_Node())
        while self._position < len(self._pattern) and self._pattern[self._position] not in "|)":
            end = self._add(_Node())
            self._nodes[last].after.append(self._one(end))
            last = end
        self._nodes[last].after.append(after)
        return first

    def _one(self, after: int) -> int:
        """Reads one expression with its quantifier."""
        for anchor in "^$":
            if self._take(anchor):
                return self._add(_Node(anchor=anchor, after=[after]))
        end = self._add(_Node())
        first = self._part(end)
        quantifier = next((one for one in "*+?" if self._take(one)), "")
        if quantifier:
            self._take("?")  # how much is taken does not change whether there is a match
        self._nodes[end].after += [after, first] if quantifier in ("*", "+") else [after]
        return self._add(_Node(after=[first, after])) if quantifier in ("*", "?") else first

    def _part(self, after: int) -> int:
        if self._take("("):
            self._depth += 1
            if self._depth > _MAX_DEPTH or (self._take("?") and not self._take(":")):
                raise self._unknown()
            first = self._choice(after)
            if not self._take(")"):
                raise self._unknown()
            self._depth -= 1
            return first
        match = _ATOM.match(self._pattern, self._position)
        if match is None:
            raise self._unknown()
        self._position = match.end()
        try:
            return self._add(_Node(atom=re.compile(match[0]), after=[after]))
        except re.error as exc:
            raise self._unknown() from exc

    def _take(self, char: str) -> bool:
        is_next = self._pattern.startswith(char, self._position)
        self._position += is_next
        return is_next

    def _add(self, node: _Node) -> int:
        self._nodes.append(node)
        return len(self._nodes) - 1

    def _unknown(self) -> UnsupportedError:
        return UnsupportedError(
            f"the target {self._pattern!r} is not known from character {self._position} on: known are characters, "
            "sets, groups, |, *, +, ? and anchors"
        )
