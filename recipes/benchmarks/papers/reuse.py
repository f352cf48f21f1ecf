"""Figure 2 of Eliseev and Mazur (2023): hits of a cache over its size, and recall of experts fetched ahead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from rich.progress import Progress
from torch import Tensor, nn

from recipes.benchmarks.arms import local_model
from recipes.benchmarks.papers.caches import POLICIES, Uses, hit_ratio
from recipes.benchmarks.papers.shown import Figures, Rows, Shown, ShownReport, finished
from recipes.study.verdicts import paired, plus_minus, verdict
from recipes.benchmarks.papers.traces import Trace, held_out_pieces, ranking, traces, trained_prmoe
from recipes.benchmarks.texts import text_pieces
from recipes.study.drawing import GOOD, INK, MARK, MUTED, WARM, tidy
from recipes.study.intervals import t_interval
from swarm_plugins.offload.ahead.prefetch import find_routers
from swarm_plugins.talk.turns import load_tokenizer

MOST_AHEAD = 10
FIRST = 32
"""Tokens of a piece that fill caches and do not count."""
AS_IT_IS, WITH_MEAN = "as it is", "with the mean"
_TEXTS = ("addresses", "python")
_SHOWN_AHEAD = (1, 2, 3, 5, 10)
_COLORS = (INK, MARK, GOOD, WARM, MUTED)


def bench_reuse(
    directories: Sequence[Path],
    *,
    prmoe: Path | None,
    num_pieces: int,
    length: int,
    plot: Path | None,
    progress: Progress,
) -> ShownReport:
    """Traces the experts of each model over two texts, and simulates caches and guesses.

    Args:
        directories: Mixtures of experts.
        prmoe: Folder in which a small PR-MoE is trained, or was; None: without.
        num_pieces: Most pieces of each text, at least 2.
        length: Tokens of a piece.
        plot: File of the picture.
        progress: Shows how far it is.

    Raises:
        ConfigError: If the model, its tokenizer or a text is missing.
        MissingExtraError: If the texts are not installed.
        UnsupportedError: If a model is not a mixture of experts.
    """
    models: dict[str, Any] = {}
    for name, model, pieces in _models(directories, prmoe, num_pieces, length, progress):
        bar = progress.add_task(name, total=len(pieces))
        found = traces(model, pieces, lambda bar=bar: progress.advance(bar))  # type: ignore[misc]
        models[name] = figures_of(find_routers(model), found)
    figures = {"length": length, "first": FIRST, "models": models}
    report = ShownReport(command="benchmark reuse", model=", ".join(models), shown=REUSE, figures=figures)
    report.notes.append(f"{length} tokens a piece; caches are filled by the first {FIRST}, which do not count")
    report.notes.append("the means that are added to inputs were learned on the other half of the pieces")
    return finished(report, plot)


def figures_of(routers: Sequence[nn.Module], found: Sequence[Trace]) -> dict[str, Any]:
    """Returns hit ratios by policy and size, and recalls by input, distance and experts fetched, for each piece."""
    num_experts = [_num_experts(router) for router in routers]
    uses: list[list[Uses]] = [[picks.tolist() for picks in trace.picks] for trace in found]
    hits = {
        name: {
            str(size): [round(hit_ratio(one, num_experts, size, policy, first=FIRST), 4) for one in uses]
            for size in range(1, max(num_experts))
        }
        for name, policy in POLICIES.items()
    }
    distances = [str(ahead) for ahead in range(1, min(MOST_AHEAD, len(routers) - 1) + 1)]
    recall = {
        kind: {ahead: _recalls(routers, found, int(ahead), kind == WITH_MEAN) for ahead in distances}
        for kind in (AS_IT_IS, WITH_MEAN)
    }
    picks = found[0].picks[0].shape[1]
    return {"experts": num_experts, "picks": picks, "pieces": len(found), "hits": hits, "recall": recall}


def _models(
    directories: Sequence[Path], prmoe: Path | None, num_pieces: int, length: int, progress: Progress
) -> Iterator[tuple[str, nn.Module, Tensor]]:
    for directory in directories:
        tokenizer = load_tokenizer(str(directory), None)
        pieces = [text_pieces(tokenizer, text, num_pieces, length)[0] for text in _TEXTS]
        yield directory.resolve().name, local_model(directory), torch.cat(pieces)
    if prmoe is not None:
        bar = progress.add_task("training the PR-MoE", total=None)
        model, corpus = trained_prmoe(prmoe)
        progress.remove_task(bar)
        yield "PR-MoE", model, held_out_pieces(corpus, len(_TEXTS) * num_pieces, length)


def _recalls(
    routers: Sequence[nn.Module], found: Sequence[Trace], ahead: int, with_mean: bool
) -> dict[str, list[float]]:
    """Returns for each number of experts fetched, and each piece, the share of the used experts that are among them.

    Layers with experts are counted, and all layers with one that many before them are averaged.
    """
    sums: dict[int, list[float]] = {}
    for layer in range(ahead, len(routers)):
        means = _means(found, layer, ahead) if with_mean else None
        for piece, trace in enumerate(found):
            inputs = trace.inputs[layer - ahead]
            ranked = ranking(routers[layer], inputs if means is None else inputs + means[piece % 2])
            place = (ranked[:, None, :] == trace.picks[layer][:, :, None]).int().argmax(dim=-1)  # [T, k]
            for fetched in range(1, ranked.shape[1] + 1):
                found_share = float((place[FIRST:] < fetched).float().mean())
                sums.setdefault(fetched, [0.0] * len(found))[piece] += found_share / (len(routers) - ahead)
    largest = max(sums)
    # Of a pyramid's smaller layers, all experts are fetched at most.
    smaller = [layer for layer in range(ahead, len(routers)) if _num_experts(routers[layer]) < largest]
    for layer in smaller:
        for fetched in range(_num_experts(routers[layer]) + 1, largest + 1):
            sums[fetched] = [one + 1 / (len(routers) - ahead) for one in sums[fetched]]
    return {str(fetched): [round(one, 4) for one in values] for fetched, values in sums.items()}


def _means(found: Sequence[Trace], layer: int, ahead: int) -> list[Tensor]:
    """Returns what the layers between add on average, learned on odd pieces for even ones, and the other way round."""
    halves = []
    for half in (1, 0):
        added = [trace.inputs[layer] - trace.inputs[layer - ahead] for trace in found[half::2]]
        halves.append(torch.cat(added).mean(0))
    return halves


def _num_experts(router: nn.Module) -> int:
    return len(cast(Tensor, router.weight))


def _tables(figures: Figures) -> list[Rows]:
    hits = []
    for name, one in figures["models"].items():
        sizes = next(iter(one["hits"].values()))
        for size in sizes:
            label = f"{name}, {one['picks']} of {_experts(one)}" if size == "1" else ""
            hits.append((label, size, *(plus_minus(one["hits"][policy][size], digits=3) for policy in POLICIES)))
    recall = []
    for name, one in figures["models"].items():
        for kind, distances in one["recall"].items():
            for ahead in (str(each) for each in _SHOWN_AHEAD if str(each) in distances):
                cells = [distances[ahead].get(str(fetched)) for fetched in (1, 2, 3, 4, 6)]
                label = f"{name}, {kind}" if ahead == "1" else ""
                shown = [plus_minus(cell, digits=3) if cell and sum(cell) < len(cell) else "" for cell in cells]
                recall.append((label, ahead, *shown))
    return [
        Rows(("model", "k", *POLICIES), hits),
        Rows(("model, input", "layers early", *(f"{n} fetched" for n in (1, 2, 3, 4, 6))), recall),
    ]


def _verdicts(figures: Figures) -> list[str]:
    found = []
    for name, one in figures["models"].items():
        size = str(max(one["experts"]) // 2)
        hits = {policy: sizes[size] for policy, sizes in one["hits"].items()}
        even = sum(min(1.0, int(size) / count) for count in one["experts"]) / len(one["experts"])
        reused = t_interval([each - even for each in hits["LRU"]])
        found.append(
            verdict(f"an LRU cache of k = {size} hits more often than one with random experts, {name}", reused)
        )
        counting = paired(hits["LRU"], hits["counting"])
        found.append(verdict(f"counting uses hits more often than LRU, {name}", counting))
        exact, mean = (one["recall"][kind]["1"][str(one["picks"])] for kind in (AS_IT_IS, WITH_MEAN))
        found.append(
            verdict(f"the mean of what is between names more experts a layer early, {name}", paired(exact, mean))
        )
    return found


def _draw(figures: Figures, figure: Any) -> None:
    panels = figure.subplots(len(figures["models"]), 2, squeeze=False)
    for (name, one), (left, right) in zip(figures["models"].items(), panels, strict=True):
        for (policy, sizes), color in zip(one["hits"].items(), (INK, MARK, GOOD), strict=True):
            _line(left, sizes, color, policy)
        left.set_ylabel(name)
        distances = one["recall"][AS_IT_IS]
        for ahead, color in zip((each for each in _SHOWN_AHEAD if str(each) in distances), _COLORS, strict=False):
            _line(right, distances[str(ahead)], color, f"{ahead} early")
        _line(right, one["recall"][WITH_MEAN]["1"], MARK, "1 early, with the mean", dashed=True)
        for axes in (left, right):
            axes.set_ylim(0, 1.03)
            axes.legend(frameon=False, fontsize=7, loc="lower right")
            tidy(axes)
    panels[0][0].set_title("hit ratio over experts cached in a layer", fontsize=9)
    panels[0][1].set_title("recall over experts fetched ahead", fontsize=9)


def _line(axes: Any, values: Mapping[str, Sequence[float]], color: str, label: str, *, dashed: bool = False) -> None:
    intervals = [t_interval(one) for one in values.values()]
    sizes = [int(size) for size in values]
    axes.fill_between(sizes, [one.low for one in intervals], [one.high for one in intervals], color=color, alpha=0.15)
    style = "--" if dashed else "o-"
    axes.plot(sizes, [one.mean for one in intervals], style, color=color, label=label, markersize=3, linewidth=1.2)


def _experts(one: Mapping[str, Any]) -> str:
    counts = one["experts"]
    return str(counts[0]) if len(set(counts)) == 1 else "-".join(map(str, counts))


REUSE = Shown(name="reuse", page="results.md", tables=_tables, verdicts=_verdicts, draw=_draw, size=(8.5, 3.4))
