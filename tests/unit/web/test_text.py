"""Text as it comes: whole characters only, and nothing of a stop text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_plugins.web.engine.text import StopTexts, TextStream


@given(st.text(max_size=30))
def test_bytes_of_any_text_add_up(text: str) -> None:
    stream = TextStream(lambda tokens: bytes(tokens).decode(errors="replace"))
    assert "".join(map(stream.add, text.encode())) + stream.end() == text


def test_what_never_becomes_a_character_is_given_up() -> None:
    stream = TextStream(lambda tokens: bytes(tokens).decode(errors="replace"))
    given = [stream.add(0xF0) for _ in range(12)]
    assert given[3]
    assert "".join([*given, stream.end()]) == "\ufffd" * 12


def test_half_a_character_waits_and_is_shown_at_the_end() -> None:
    stream = TextStream(lambda tokens: bytes(tokens).decode(errors="replace"))
    first, *rest = "é".encode()
    assert stream.add(first) == ""
    assert stream.add(*rest) == "é"
    stream.add(first)
    assert stream.end() == "\ufffd"


@given(st.lists(st.text("ab.", max_size=3), max_size=12), st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3))
def test_a_text_ends_before_the_first_stop_text(pieces: list[str], stops: list[str]) -> None:
    texts = StopTexts(stops)
    given_ = "".join(map(texts.add, pieces)) + texts.end()
    whole = "".join(pieces)
    ends = [at for stop in stops if (at := whole.find(stop)) >= 0]
    assert texts.is_reached == bool(ends)
    # A stop text is noticed with its last character, so an earlier one that is longer may come too late.
    assert whole.startswith(given_)
    assert not any(stop in given_ for stop in stops)
    if not ends:
        assert given_ == whole


@pytest.mark.parametrize("size", [1, 2, 100])
def test_nothing_that_may_begin_a_stop_text_is_given(size: int) -> None:
    texts = StopTexts(["STOP"])
    text = "say STOX and STOP here"
    seen = "".join(texts.add(text[at : at + size]) for at in range(0, len(text), size)) + texts.end()
    assert seen == "say STOX and "
