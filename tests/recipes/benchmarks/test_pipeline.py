"""What training in chunks could gain at best."""

from __future__ import annotations

import pytest

from recipes.benchmarks.network.pipeline import pipelined_s


def test_the_bound_of_a_pipeline() -> None:
    # N C / (C + N - 1) of Huang et al. 2019, section 2.3, where trips take no time.
    assert pipelined_s(3, 1, 1.0, 0.0) / pipelined_s(3, 8, 1.0, 0.0) == pytest.approx(2.4)
    assert pipelined_s(3, 8, 1.0, 0.02) == pytest.approx(0.06 + 1.25)
