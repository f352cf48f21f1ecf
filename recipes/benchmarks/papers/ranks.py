"""Expert parallelism in figures: three exchanges over ranks, against the formulas of DeepSpeed-MoE, section 5.3.

Letters: P ranks, G of them on a node, N rows of a rank, D width. The ranks of a node share a batch in the coordinated
exchange, so that T = G.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import Progress

from recipes.benchmarks.papers.ranks_worker import WAYS, Counted, Layer, run_layer
from recipes.benchmarks.papers.shown import Figures, Rows, Shown, ShownReport, finished
from recipes.study.verdicts import paired, plus_minus, verdict
from recipes.study.drawing import GOOD, INK, MARK, tidy
from recipes.study.intervals import t_interval, welch_interval
from swarm_plugins.errors import ConfigError

_EXPERTS, _WIDTH, _TOKEN_US, _MBIT = 32, 256, 50.0, 1000.0
# A message much dearer than its bytes, and one that costs nothing.
MESSAGE_MS = (0.0, 20.0)
_COLORS = dict(zip(WAYS, (INK, MARK, GOOD), strict=True))


def formula(way: str, ranks: int, node: int) -> tuple[int, float]:
    """Returns messages to other ranks of one exchange of rows, and the share of a rank's rows that it sends.

    The share counts a row as often as it is sent, for experts that are equally likely.
    """
    nodes = ranks // node
    inside, between = (node - 1) / node, (nodes - 1) / nodes
    if way == "flat":
        return ranks - 1, (ranks - 1) / ranks
    if way == "hierarchical":
        return (node - 1) + (nodes - 1), inside + between
    # Rows go to the nodes of their experts, and from there to all ranks of that node.
    return (nodes - 1) + (node - 1), between + node - 1


def bench_ranks(
    *,
    ranks: Sequence[int],
    node: int,
    tokens: int,
    seeds: int,
    plot: Path | None,
    progress: Progress,
    message_ms: Sequence[float] = MESSAGE_MS,
) -> ShownReport:
    """Runs a layer with experts on some numbers of ranks by each exchange.

    Args:
        ranks: Numbers of ranks, each a divisor of 32; a multiple of ``node``, or below it.
        node: Ranks of a node.
        tokens: Rows of all ranks together.
        seeds: Passes with other rows and experts.
        plot: File of the picture.
        progress: Shows how far it is.
        message_ms: What messages to other nodes cost.

    Raises:
        ConfigError: If the experts or the nodes cannot be divided among that many ranks.
        SwarmError: If a rank fails, or gets other rows back than it sent.
    """
    for count in ranks:
        if _EXPERTS % count or (count > node and count % node):
            raise ConfigError(
                f"--ranks {count} with nodes of {node}: expected a divisor of {_EXPERTS} experts that is a multiple of "
                "--node, or at most that"
            )
    layers = [
        Layer(
            ranks=count,
            node=min(node, count),
            way=way,
            experts=_EXPERTS,
            tokens=tokens,
            width=_WIDTH,
            message_ms=cost,
            mbit=_MBIT,
            token_us=_TOKEN_US,
            seeds=seeds,
        )
        for cost in message_ms
        for count in ranks
        for way in (WAYS if count > node else WAYS[:1])
    ]
    bar = progress.add_task("ranks", total=len(layers))
    passes = []
    for layer in layers:
        passes.append({**asdict(layer), "counted": _summary(layer, run_layer(layer))})
        progress.advance(bar)
    report = ShownReport(command="benchmark ranks", model="one layer", shown=RANKS, figures={"passes": passes})
    report.notes.append(
        f"{_EXPERTS} experts, {tokens} rows of width {_WIDTH} in all, float32, nodes of {node} ranks; an expert waits "
        f"{_TOKEN_US:g} µs a row; a rank sends {_MBIT:g} Mbit/s to other nodes, besides the time of messages"
    )
    report.notes.append("each exchange gave back the rows that were sent, to the bit")
    return finished(report, plot)


def _summary(layer: Layer, found: Sequence[Sequence[Counted]]) -> dict[str, Any]:
    """Returns, by seed, means over ranks, and the time of the slowest rank."""
    by_seed = [[rank[seed] for rank in found] for seed in range(layer.seeds)]
    return {
        "messages": found[0][0].messages,
        "far_messages": found[0][0].far_messages,
        "bytes": [round(sum(one.row_bytes for one in ranks) / layer.ranks) for ranks in by_seed],
        "ms": [round(1e3 * max(one.seconds for one in ranks), 2) for ranks in by_seed],
    }


def expected_bytes(one: Mapping[str, Any]) -> float:
    """Returns the bytes of rows that a rank sends, there and back, by the formula."""
    _, share = formula(one["way"], one["ranks"], one["node"])
    return float(2 * share * one["tokens"] / one["ranks"] * one["width"] * 4)


def _tables(figures: Figures) -> list[Rows]:
    heads = (
        *("a message", "ranks", "exchange", "messages of a pass", "to other nodes", "bytes of a rank"),
        *("over the formula", "ms", "rows/s"),
    )
    rows = []
    for one in figures["passes"]:
        counted, expected = one["counted"], expected_bytes(one)
        over = plus_minus([sent / expected for sent in counted["bytes"]], digits=3) if expected else ""
        rows.append(
            (
                f"{one['message_ms']:g} ms",
                str(one["ranks"]),
                one["way"] if one["ranks"] > 1 else "none",
                str(counted["messages"]),
                str(counted["far_messages"]),
                f"{t_interval(counted['bytes']).mean:,.0f}",
                over,
                plus_minus(counted["ms"], digits=1),
                f"{one['tokens'] / t_interval(counted['ms']).mean * 1e3:,.0f}",
            )
        )
    return [Rows(heads, rows)]


def _verdicts(figures: Figures) -> list[str]:
    found = []
    most = max(one["ranks"] for one in figures["passes"])
    by_key = {(one["message_ms"], one["ranks"], one["way"]): one["counted"] for one in figures["passes"]}
    alone, together = (by_key.get((0.0, count, "flat")) for count in (1, most))
    if most > 1 and alone is not None and together is not None:
        claim = f"{most} ranks take less time than one where messages cost nothing"
        # Ranks draw their own rows, so that another number of them has others.
        found.append(verdict(claim, welch_interval(alone["ms"], together["ms"]), unit=" ms", digits=0))
    for message_ms in MESSAGE_MS:
        where = f"where a message costs {message_ms:g} ms, {most} ranks"
        flat, *others = (by_key.get((message_ms, most, way)) for way in WAYS)
        for way, other in zip(WAYS[1:], others, strict=True):
            if flat is not None and other is not None:
                interval = paired(other["ms"], flat["ms"])
                found.append(
                    verdict(f"the {way} exchange is faster than the flat one {where}", interval, unit=" ms", digits=0)
                )
    return found


def _draw(figures: Figures, figure: Any) -> None:
    panels = figure.subplots(1, 1 + len(MESSAGE_MS))
    for axes, message_ms in zip(panels, MESSAGE_MS, strict=False):
        _lines(axes, [one for one in figures["passes"] if one["message_ms"] == message_ms], "ms", 1.0)
        axes.set_title(f"ms of a layer, a message {message_ms:g} ms", fontsize=9)
    _lines(panels[-1], [one for one in figures["passes"] if one["message_ms"] == 0], "bytes", 1e-3)
    panels[-1].set_title("kB of rows that a rank sends", fontsize=9)
    for axes in panels:
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({one["ranks"] for one in figures["passes"]}))
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set_xlabel("ranks")
        axes.set_ylim(bottom=0)
        tidy(axes)
    panels[0].legend(frameon=False, fontsize=8)


def _lines(axes: Any, passes: Sequence[Mapping[str, Any]], what: str, unit: float) -> None:
    for way, color in _COLORS.items():
        mine = [one for one in passes if one["way"] == way]
        intervals = [t_interval([unit * value for value in one["counted"][what]]) for one in mine]
        counts = [one["ranks"] for one in mine]
        axes.fill_between(counts, [i.low for i in intervals], [i.high for i in intervals], color=color, alpha=0.15)
        axes.plot(counts, [one.mean for one in intervals], "o-", color=color, label=way, markersize=3)


RANKS = Shown(name="ranks", page="results.md", tables=_tables, verdicts=_verdicts, draw=_draw, size=(9.5, 3.2))
