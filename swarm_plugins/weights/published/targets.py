"""Regular expressions out of a stranger's config, matched in time that no expression can blow up.

Python's ``re`` backtracks: an expression of thirty characters can keep it busy for years. Here an expression becomes a
finite automaton, whose states are made as names need them (Thompson 1968, Regular Expression Search Algorithm).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from swarm_plugins.errors import UnsupportedError

MAX_CHARS = 1024
"""Longest expression."""
_MAX_STEPS = 1 << 12
"""Transitions of an automaton: characters after states."""
_MAX_NODES = 1 << 13
_MAX_DEPTH = 40
_KNOWN_STEPS = 8
"""So many known steps cost as much as finding a new one."""
_MAX_TIMES = 16
"""Most copies of a part with ``{m,n}``."""
# One character: escaped, of a set, or itself.
_ATOM = re.compile(r"\\[dDwWsS]|\\[^A-Za-z0-9]|\[\^?(?:\\[dDwWsS]|\\[^A-Za-z0-9]|[^\\\[\]])+\]|[^\\()\[\]{}|*+?^$]")
_TIMES = re.compile(r"\{(\d{1,2})(,)?(\d{1,2})?\}")
_ANCHORS = ("^", "$", r"\b")
_WORD = re.compile(r"\w")
_ACCEPT = 0

States = frozenset[int]


@dataclass
class _Node:
    """Where an expression goes on."""

    atom: re.Pattern[str] | None = None
    """What the next character must be. None: nothing is taken."""
    anchor: str = ""
    """What must be here: ``^`` and ``$`` the name's begin and end, ``\\b`` one of a word."""
    after: list[int] = field(default_factory=list)


class Target:
    """An expression that names modules: characters, sets, groups, ``|``, ``* + ?``, ``{m,n}`` and anchors.

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
        self._first = frozenset([first])
        # What the expression has cost: nodes made, characters matched and states visited.
        self.work = len(self._nodes)
        self._steps: dict[tuple[States, bool | None, str], tuple[States, bool]] = {}

    def matches(self, name: str) -> bool:
        """Returns whether a name begins with a match.

        Raises:
            UnsupportedError: If the automaton gets too large.
        """
        self.work += len(name) // _KNOWN_STEPS  # a step that is known costs little
        states, before = self._first, ""
        for char in (*name, ""):
            states, is_over = self._step(states, before, char)
            if is_over or not states:
                return is_over
            before = char
        return False

    def _step(self, states: States, before: str, char: str) -> tuple[States, bool]:
        """Returns the states after a character, and whether the match was over before it; the name ends with none."""
        key = states, _is_word(before) if before else None, char
        if key in self._steps:
            return self._steps[key]
        if len(self._steps) >= _MAX_STEPS:
            raise UnsupportedError(f"the target {self._pattern!r} is too complicated an expression")
        reached = self._reached(states, before, char)
        self.work += len(reached)
        taken = (node for node in map(self._nodes.__getitem__, reached) if node.atom and node.atom.fullmatch(char))
        found = frozenset(one for node in taken for one in node.after), _ACCEPT in reached
        self._steps[key] = found
        return found

    def _reached(self, states: States, before: str, char: str) -> set[int]:
        """Returns the states that are reached from some without taking a character, between two characters."""
        found: set[int] = set()
        waiting = list(states)
        while waiting:
            index = waiting.pop()
            if index in found:
                continue
            found.add(index)
            node = self._nodes[index]
            if node.atom is None and _is_open(node.anchor, before, char):
                waiting += node.after
        return found

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
        for anchor in _ANCHORS:
            if self._take(anchor):
                return self._add(_Node(anchor=anchor, after=[after]))
        begin, end = self._position, self._add(_Node())
        first = self._part(end)
        if times := _TIMES.match(self._pattern, self._position):
            return self._copies(begin, times, after)
        quantifier = next((one for one in "*+?" if self._take(one)), "")
        if quantifier:
            self._take("?")  # how much is taken does not change whether there is a match
        self._nodes[end].after += [after, first] if quantifier in ("*", "+") else [after]
        return self._add(_Node(after=[first, after])) if quantifier in ("*", "?") else first

    def _copies(self, begin: int, times: re.Match[str], after: int) -> int:
        """Reads the part that begins at a position as often as ``{m,n}`` says."""
        least = int(times[1])
        most = int(times[3] or 0) if times[2] else least
        is_endless = bool(times[2]) and times[3] is None
        num_copies = max(least, 1) if is_endless else most
        if num_copies > _MAX_TIMES or num_copies < max(least, 1):
            raise self._unknown()
        first = last = self._add(_Node())
        for copy in range(num_copies):
            end, self._position = self._add(_Node()), begin
            part = self._part(end)
            self._nodes[last].after += [part] if copy < least else [part, after]
            last = end
        self._nodes[last].after += [after, part] if is_endless else [after]
        self._position = times.end()
        self._take("?")
        return first

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

    def _take(self, text: str) -> bool:
        is_next = self._pattern.startswith(text, self._position)
        self._position += len(text) if is_next else 0
        return is_next

    def _add(self, node: _Node) -> int:
        if len(self._nodes) >= _MAX_NODES:
            raise UnsupportedError(f"the target {self._pattern!r} is too complicated an expression")
        self._nodes.append(node)
        return len(self._nodes) - 1

    def _unknown(self) -> UnsupportedError:
        return UnsupportedError(
            f"the target {self._pattern!r} is not known from character {self._position} on: known are characters, "
            f"sets, groups, |, *, +, ?, up to {_MAX_TIMES} copies by {{m,n}}, and anchors"
        )


def _is_open(anchor: str, before: str, char: str) -> bool:
    """Returns whether an anchor holds between two characters, of which either may be missing."""
    if anchor == r"\b":
        return _is_word(before) != _is_word(char)
    return not anchor or not (before if anchor == "^" else char)


def _is_word(char: str) -> bool:
    return _WORD.fullmatch(char) is not None
