"""The plot has each value of each version, at its height."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import numpy as np
from evaluation_kit import RECORD
from matplotlib import image
from numpy.typing import NDArray

from swarm_plugins.evaluation.plot import draw_results
from swarm_plugins.hub import EvalRecord
from swarm_plugins.hub.results import BASE_TAG

LINE, BASE = (0x09, 0x69, 0xDA), (0x65, 0x6D, 0x76)


def record(tag: str, value: float, **changes: object) -> EvalRecord:
    return msgspec.structs.replace(RECORD, **{"tag": tag, "value": value, "stderr": None, **changes})


def pixels(*records: EvalRecord) -> NDArray[Any]:
    """Returns the picture ``[height, width, 3]``, with values up to 255."""
    return np.asarray(image.imread(io.BytesIO(draw_results(records)), format="png"))[..., :3] * 255


def places(picture: NDArray[Any], colour: tuple[int, int, int]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Returns rows, from the top, and columns of the pixels of a colour."""
    rows, columns = np.nonzero(np.abs(picture - np.array(colour)).max(axis=-1) < 3)
    return rows, columns


def test_a_better_version_is_higher_and_the_base_is_a_line() -> None:
    picture = pixels(record(BASE_TAG, 0.5), record("v1", 0.25), record("v2", 0.75))
    rows, columns = places(picture, LINE)
    first, last = rows[columns == columns.min()], rows[columns == columns.max()]
    base, width = places(picture, BASE)
    line = np.bincount(base).argmax()  # most of its pixels are in one row
    assert first.mean() > line > last.mean()
    assert abs(first.mean() + last.mean() - 2 * line) < 6  # in the middle
    assert np.ptp(width[base == line]) > np.ptp(columns)


def test_a_standard_error_is_a_bar() -> None:
    without, bar = (places(pixels(record("v1", 0.5, stderr=one)), LINE)[0] for one in (None, 0.25))
    assert np.ptp(bar) > 5 * np.ptp(without)


def test_each_metric_has_a_panel_up_to_twelve() -> None:
    one, most, more = (
        pixels(*(record("v1", 0.5, metric=f"metric{number}") for number in range(count))) for count in (1, 12, 14)
    )
    assert most.shape == more.shape
    height, width = most.shape[:2]
    assert (round(height / one.shape[0]), round(width / one.shape[1])) == (6, 2)
    # One marker each.
    rows, columns = places(most, LINE)
    panels = {(6 * row // height, 2 * column // width) for row, column in zip(rows, columns, strict=True)}
    assert panels == {(row, column) for row in range(6) for column in range(2)}
