"""Pictures of benches: SVG files in colors for light and dark pages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recipes.benchmarks.figures import check_writable
from swarm_plugins.errors import ConfigError
from recipes.study.drawing import new_figure, save_svg, settings


def check_picture(file: Path) -> None:
    """Ensures, before anything slow, that a picture can be drawn to a file.

    Raises:
        ConfigError: If the file does not end in ``.svg`` or cannot be written.
        MissingExtraError: If matplotlib is not installed.
    """
    if file.suffix != ".svg":
        raise ConfigError(f"cannot draw to {file}: the picture is an SVG, so name a file that ends in .svg")
    new_figure((1.0, 1.0))
    check_writable(file, "the picture")


@contextmanager
def picture(file: Path, size: tuple[float, float]) -> Iterator[Any]:
    """Gives a figure of matplotlib, and writes it at the end.

    Args:
        file: Where it is written; its name makes the bytes repeatable.
        size: Width and height in inches.

    Raises:
        ConfigError: If the file cannot be written.
        MissingExtraError: If matplotlib is not installed.
    """
    with settings(file.stem):
        figure = new_figure(size)
        yield figure
        try:
            save_svg(figure, file)
        except OSError as exc:
            raise ConfigError(f"cannot draw to {file} ({exc}); name a file in a folder that can be written") from exc
