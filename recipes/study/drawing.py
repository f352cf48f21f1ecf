"""How pictures look: lines in colors that fit light and dark pages, as SVG."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from swarm_plugins.errors import naming_extras

# What matplotlib draws with, and the colors that a browser puts in its place: light, dark.
_COLORS = {
    "#010101": ("ink", "#1f2328", "#f0f6fc"),
    "#020202": ("muted", "#8c959f", "#7d8590"),
    "#030303": ("good", "#1a7f37", "#3fb950"),
    "#040404": ("mark", "#0969da", "#58a6ff"),
    "#050505": ("warm", "#bc4c00", "#f0883e"),
}
INK, MUTED, GOOD, MARK, WARM = _COLORS
_INKED = ("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color")


def new_figure(size: tuple[float, float] | None = None) -> Any:
    """Returns a figure of matplotlib, ``size`` in inches.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    return _matplotlib().figure.Figure(figsize=size, layout="constrained")


@contextlib.contextmanager
def settings(salt: str) -> Iterator[None]:
    """Draws in the colors of this module inside the context; ``salt`` makes the bytes of a picture repeatable.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    inked = dict.fromkeys(_INKED, INK)
    with _matplotlib().rc_context({"svg.hashsalt": salt, "font.size": 9, "svg.fonttype": "none", **inked}):
        yield


def save_svg(figure: Any, file: Path) -> None:
    """Writes a figure of matplotlib as SVG for light and dark pages."""
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None}, transparent=True)
    file.write_text(_for_both_modes(written.getvalue()))


def tidy(axes: Any) -> None:
    """Removes the frame at the top and on the right."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _matplotlib() -> Any:
    with naming_extras():
        import matplotlib.figure
    return matplotlib


def _for_both_modes(svg: str) -> str:
    for color, (role, _, _) in _COLORS.items():
        svg = svg.replace(color, f"var(--{role})")
    light, dark = (";".join(f"--{role}:{pair[mode]}" for role, *pair in _COLORS.values()) for mode in (0, 1))
    style = f"svg {{ {light} }} @media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}"
    style += " text { font-family: system-ui, sans-serif !important }"
    svg = svg.replace("<defs>", f"<style>{style}</style>\n <defs>", 1)
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"
