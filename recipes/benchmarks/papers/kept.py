"""Regenerates the pictures and tables of the docs from their kept figures."""

from __future__ import annotations

from recipes.benchmarks.web.curves import CURVES
from recipes.benchmarks.papers.codes import CODES
from recipes.benchmarks.papers.crossing import CROSSING
from recipes.benchmarks.papers.eight_bits import EIGHT_BITS
from recipes.benchmarks.papers.few_bits import FEW_BITS
from recipes.benchmarks.papers.ranks import RANKS
from recipes.benchmarks.papers.read_time import READ_TIME
from recipes.benchmarks.papers.reuse import REUSE
from recipes.benchmarks.papers.shown import PICTURES, Shown
from recipes.benchmarks.papers.sizes import SIZES
from recipes.benchmarks.papers.table3 import TABLE3

KEPT: tuple[Shown, ...] = (TABLE3, CODES, CROSSING, EIGHT_BITS, FEW_BITS, REUSE, RANKS, SIZES, READ_TIME, CURVES)


def main() -> None:
    """Draws all pictures again and prints the tables and verdicts for the pages."""
    for shown in KEPT:
        figures = shown.kept()
        shown.draw_to(PICTURES / f"{shown.name}.svg", figures)
        print(f"\n<!-- {shown.page}: {shown.name} -->")
        print("\n\n".join([*(rows.as_markdown() for rows in shown.tables(figures)), *shown.verdicts(figures)]))


if __name__ == "__main__":
    main()
