"""Makes the pictures of a run of ``swarm demo``: its terminal, and the held-out loss before and after.

``make pictures`` runs the demonstration (minutes) and draws both; ``--redraw`` draws the run in ``demo.json`` again.
The third picture, ``chain.svg``, is drawn by hand.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib
from matplotlib import pyplot
from rich.console import Console
from rich.padding import Padding
from rich.terminal_theme import TerminalTheme
from rich.text import Text

HERE = Path(__file__).parent
RECORD = HERE / "demo.json"
COLUMNS = 100
SANS = 'system-ui, -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif'
MONO = 'ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", "DejaVu Sans Mono", monospace'
# What matplotlib draws with, and the two colors that a browser puts in its place: light, dark.
COLORS = {
    "#010101": ("ink", "#1f2328", "#f0f6fc"),
    "#020202": ("muted", "#59636e", "#9198a1"),
    "#030303": ("line", "#d1d9e0", "#3d444d"),
    "#040404": ("before", "#8c959f", "#7d8590"),
    "#050505": ("after", "#1a7f37", "#3fb950"),
    "#060606": ("paper", "#ffffff", "#0d1117"),
}
INK, MUTED, LINE, BEFORE, AFTER, PAPER = COLORS
ANSI = [(110, 118, 129), (255, 123, 114), (63, 185, 80), (210, 153, 34), (88, 166, 255), (188, 140, 255)]
ANSI += [(57, 197, 207), (230, 237, 243)]
THEME = TerminalTheme((13, 17, 23), (230, 237, 243), ANSI, ANSI)


def record() -> dict[str, object]:
    """Runs ``swarm demo`` in an empty folder.

    Returns:
        What it wrote to standard output, and the loss of each held-out address. Progress bars go to standard error,
        which stays the caller's.
    """
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "swarm_plugins", "demo"]
        run = subprocess.run(command, cwd=name, stdout=subprocess.PIPE, text=True, check=True)
        losses = json.loads((Path(name) / "swarm-demo" / "losses.json").read_text())
        text = run.stdout.replace(f"{Path(name).resolve()}{os.sep}", "").replace(str(Path.home()), "~")
    return {"text": text, **losses}


def draw_terminal(text: str, path: Path) -> None:
    """Draws the terminal as it looks at the end; the words come from the run, the colors are added."""
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), color_system="truecolor")  # noqa: SIM115
    console.print(Text.assemble(("\n $ ", "green"), ("swarm demo", "bold")))
    for line in text.splitlines():
        shown = Text(line.strip())
        shown.highlight_regex(r"^\d\. .*", "bold bright_blue")
        shown.highlight_regex(r"-?\d+\.\d+ ± \d+\.\d+|(?<=differ by )at most .*|within .*", "green")
        shown.highlight_regex(r"process \d+|me/sotu-adapter@v\d+|^Done in \d+ s", "yellow")
        shown.highlight_regex(r"^(without the adapter|with the adapter):", "bright_black")
        indent = len(line) - len(line.lstrip())
        console.print(Padding(shown, (0, 1, 0, 1 + indent)))
    console.print()
    svg = console.export_svg(title="swarm demo", theme=THEME, unique_id="demo")
    # Nothing is fetched from other sites when the picture is shown.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    svg = svg.replace("Fira Code, monospace", MONO).replace("font-family: arial", f"font-family: {SANS}")
    write(path, svg)


def draw_losses(before: list[float], after: list[float], path: Path) -> None:
    """Draws a line per held-out address from its loss without the adapter to its loss with it."""
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "demo", "font.size": 12, "text.color": INK})
    figure, axes = pyplot.subplots(figsize=(8.4, 3.6))
    pairs = sorted(zip(before, after, strict=True), reverse=True)
    places = range(1, len(pairs) + 1)
    axes.vlines(places, [new for _, new in pairs], [old for old, _ in pairs], color=LINE, linewidth=4, zorder=1)
    axes.plot(places, [old for old, _ in pairs], "o", color=BEFORE, markersize=8, label="without the adapter")
    axes.plot(places, [new for _, new in pairs], "o", color=AFTER, markersize=8, label="with the adapter")
    changes = [new - old for old, new in pairs]
    error = statistics.stdev(changes) / math.sqrt(len(changes))
    mean = f"{statistics.mean(changes):+.3f}".replace("-", "\N{MINUS SIGN}")
    better = sum(change < 0 for change in changes)
    axes.set_title(
        f"{better} of {len(pairs)} held-out addresses improve: loss {mean} ± {error:.3f}",
        loc="left",
        fontsize=13,
        color=INK,
        pad=14,
    )
    axes.set_ylabel("loss per token", color=MUTED)
    axes.set_xlabel("addresses that the adapter was not trained on, sorted", color=MUTED)
    axes.set_xticks([])
    axes.tick_params(colors=MUTED, length=0)
    axes.grid(axis="y", color=LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_facecolor(PAPER)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.legend(loc="upper right", frameon=False)
    figure.tight_layout(pad=1.6)
    with tempfile.TemporaryDirectory() as name:
        drawn = Path(name) / "losses.svg"
        figure.savefig(drawn, facecolor=PAPER, metadata={"Date": None})
        svg = drawn.read_text()
    for color, (role, light, _) in COLORS.items():
        svg = svg.replace(color, f"var(--{role}, {light})")
    light, dark = (";".join(f"--{role}:{pair[mode]}" for role, *pair in COLORS.values()) for mode in (0, 1))
    style = f"svg {{ {light} }} @media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}"
    style += f" text {{ font-family: {SANS} !important }}"
    write(path, svg.replace("<defs>", f"<style>{style}</style>\n <defs>", 1))


def write(path: Path, svg: str) -> None:
    """Writes a picture without blanks at the ends of its lines."""
    path.write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n")
    print(f"{path}: {path.stat().st_size:,} bytes")  # noqa: T201


def main() -> None:
    """Records the demonstration unless told not to, and draws it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--redraw", action="store_true", help="draw the run in demo.json again")
    if not parser.parse_args().redraw:
        RECORD.write_text(json.dumps(record(), indent=1, ensure_ascii=False) + "\n")
    run = json.loads(RECORD.read_text())
    draw_terminal(run["text"], HERE / "demo.svg")
    draw_losses(run["before"], run["after"], HERE / "losses.svg")


if __name__ == "__main__":
    main()
