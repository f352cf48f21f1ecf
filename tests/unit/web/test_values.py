"""The number of values in a JSON text, counted while it arrives."""

from __future__ import annotations

import itertools
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from swarm_plugins.web.protocol.values import ValueCounter

TEXTS = st.text(alphabet='a\\",[{}] \n☃', max_size=8)
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=30,
)


def size(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(size, inner))


@given(VALUES, st.lists(st.integers(0, 400), max_size=6), st.booleans())
def test_no_value_is_missed_however_the_text_is_cut(value: Any, cuts: list[int], escapes: bool) -> None:
    text = json.dumps(value, ensure_ascii=escapes).encode()
    counter, places = ValueCounter(), sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    counts = [counter.add(text[start:end]) for start, end in itertools.pairwise(places)]
    assert size(value) - 1 <= counts[-1] <= 2 * size(value)
    assert counts == sorted(counts)
