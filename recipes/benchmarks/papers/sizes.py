"""What PR-MoE and its students save: the paper's models, their smallest memory and the weights that a token reads.

DeepSpeed-MoE, sections 4.1.4, 4.2 and 5.5: sizes are counted on the models themselves, whose weights are not allocated.
Nothing is timed, so there are no seeds: a count has no interval.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from rich.progress import Progress

from recipes.benchmarks.papers.shown import Figures, Rows, Shown, ShownReport, finished
from recipes.study.drawing import GOOD, INK, MARK, tidy
from swarm_plugins.models import PRMoEConfig, PRMoEForCausalLM
from swarm_plugins.parallel.layout import EpSize, ExpertLayer, Placement, plan_layers

FAMILIES = {
    "350M": ("350M+MoE-128", "350M+PR-MoE-32/64", "350M+PR-MoE-32/64+L21"),
    "1.3B": ("1.3B+MoE-128", "1.3B+PR-MoE-64/128", "1.3B+PR-MoE-64/128+L21"),
}
"""By dense base: standard MoE, PR-MoE, and its student (Mixture-of-Students)."""
_DENSE_EQUAL = {"1.3B": "6.7B"}
"""Dense models of the same quality, according to the paper."""
_KINDS = ("MoE", "PR-MoE", "PR-MoE + MoS")
_BATCHES = (1, 8, 64, 512)
_BYTES = 2
_WORLD = 128
"""Ranks of the layouts that are compared."""


def bench_sizes(*, plot: Path | None, progress: Progress) -> ShownReport:
    """Counts the paper's models, and the layouts of a pyramid on ranks."""
    names = [*(name for family in FAMILIES.values() for name in family), *_DENSE_EQUAL.values()]
    bar = progress.add_task("counting", total=len(names))
    models = {}
    for name in names:
        models[name] = count(PRMoEConfig.preset(name))
        progress.advance(bar)
    pyramid = models[FAMILIES["1.3B"][1]]
    sizes: dict[str, EpSize] = {"one for all: 64": 64, "one for all: 32": 32, "per layer": "auto"}
    layouts = {name: layout(pyramid, size, _WORLD) for name, size in sizes.items()}
    figures = {"models": models, "layouts": layouts, "world": _WORLD}
    report = ShownReport(command="benchmark sizes", model=", ".join(FAMILIES), shown=SIZES, figures=figures)
    report.notes.append("16 bits a weight; a batch's tokens are of different sequences, and experts equally likely")
    return finished(report, plot)


def count(config: PRMoEConfig) -> dict[str, Any]:
    """Counts a model's parameters: all, outside experts, of one expert, and experts by layer."""
    with torch.device("meta"):
        model = PRMoEForCausalLM(config)
    total = sum(one.numel() for one in model.parameters())
    experts = {name: one for name, one in model.named_parameters() if ".experts." in name}
    pools = [count for count in cast("list[int]", config.experts_per_layer) if count]
    in_experts = sum(one.numel() for one in experts.values())
    each = in_experts // sum(pools) if pools else 0
    return {"total": total, "others": total - in_experts, "expert": each, "pools": pools}


def read_bytes(one: Mapping[str, Any], batch: int) -> float:
    """Returns the bytes of weights that a step of so many tokens reads: all but the experts that none of them takes."""
    taken = sum(pool * (1 - (1 - 1 / pool) ** batch) for pool in one["pools"])
    return float(_BYTES * (one["others"] + taken * one["expert"]))


def layout(one: Mapping[str, Any], ep_size: EpSize, world: int) -> dict[str, Any]:
    """Returns what a rank holds and sends for a group size of each layer.

    A row goes to another rank of its group, unless its expert is here; gradients of experts are averaged over copies.
    """
    layers = [ExpertLayer(f"layers.{index}.experts", index, pool) for index, pool in enumerate(one["pools"])]
    found = plan_layers(layers, len(layers), ep_size, Placement(world_size=world))
    held = [each.layer.num_experts / each.ep_size for each in found]
    averaged = [2 * (1 - 1 / each.num_replicas) * here for each, here in zip(found, held, strict=True)]
    return {
        "sizes": sorted({each.ep_size for each in found}),
        "held": sum(held) * one["expert"] * _BYTES,
        "messages": sum(each.ep_size - 1 for each in found) / len(found),
        "away": sum(1 - 1 / each.ep_size for each in found) / len(found),
        "averaged": sum(averaged) * one["expert"] * _BYTES,
    }


def _tables(figures: Figures) -> list[Rows]:
    heads = ("model", "parameters", "memory", "of MoE's", *(f"GB read, batch {batch}" for batch in _BATCHES))
    rows = []
    for base, names in FAMILIES.items():
        first = figures["models"][names[0]]["total"]
        for name in (*names, *((_DENSE_EQUAL[base],) if base in _DENSE_EQUAL else ())):
            one = figures["models"][name]
            memory = f"{one['total'] * _BYTES / 1e9:.1f} GB"
            read = (f"{read_bytes(one, batch) / 1e9:.2f}" for batch in _BATCHES)
            rows.append((name, f"{one['total'] / 1e9:.2f} B", memory, f"{one['total'] / first:.2f}", *read))
    heads_of_layouts = ("group size", "experts of a rank", "messages", "rows sent away", "gradients averaged")
    layouts = [
        (
            name if name.startswith("one") else f"{name}: {' and '.join(map(str, one['sizes']))}",
            f"{one['held'] / 1e9:.2f} GB",
            f"{one['messages']:.1f}",
            f"{one['away']:.3f}",
            f"{one['averaged'] / 1e9:.2f} GB",
        )
        for name, one in figures["layouts"].items()
    ]
    return [Rows(heads, rows), Rows(heads_of_layouts, layouts)]


def _verdicts(figures: Figures) -> list[str]:
    found = []
    for base, names in FAMILIES.items():
        standard, _, student = (figures["models"][name] for name in names)
        ratio = standard["total"] / student["total"]
        found.append(f"Counted: PR-MoE + MoS of {base} needs {ratio:.2f} times less memory than standard MoE.")
    one_size, own = (figures["layouts"][name] for name in ("one for all: 64", "per layer"))
    found.append(
        f"Counted: on {figures['world']} ranks, a group size for each layer leaves a rank {own['held'] / 1e9:.2f} GB "
        f"of experts instead of {one_size['held'] / 1e9:.2f} GB, with {own['messages']:.1f} messages instead of "
        f"{one_size['messages']:.1f}."
    )
    dense = figures["models"][_DENSE_EQUAL["1.3B"]]
    standard, _, student = (figures["models"][name] for name in FAMILIES["1.3B"])
    for batch in (_BATCHES[0], _BATCHES[-1]):
        ratios = (read_bytes(dense, batch) / read_bytes(one, batch) for one in (standard, student))
        shown = " and ".join(f"{ratio:.2f}" for ratio in ratios)
        found.append(
            f"Counted: at batch {batch}, dense 6.7B reads {shown} times the bytes of 1.3B+MoE-128 and of its "
            "PR-MoE + MoS."
        )
    return found


def _draw(figures: Figures, figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    places = range(len(FAMILIES))
    for shift, (kind, color) in enumerate(zip(_KINDS, (INK, MARK, GOOD), strict=True)):
        sizes = [figures["models"][names[shift]]["total"] * _BYTES / 1e9 for names in FAMILIES.values()]
        left.bar([place + 0.27 * (shift - 1) for place in places], sizes, 0.25, color=color, label=kind)
        one = figures["models"][FAMILIES["1.3B"][shift]]
        right.plot(_BATCHES, [read_bytes(one, batch) / 1e9 for batch in _BATCHES], "o-", color=color, label=kind)
    dense = read_bytes(figures["models"]["6.7B"], 1) / 1e9
    right.axhline(dense, color=INK, linestyle="--", linewidth=0.8, label="dense 6.7B")
    left.set_xticks(list(places), [f"{base} base" for base in FAMILIES])
    left.set_title("smallest memory, GB", fontsize=9)
    right.set_title("GB of weights that a step reads, 1.3B base", fontsize=9)
    right.set_xlabel("tokens of a step")
    for axes, scales in ((left, ("yscale",)), (right, ("xscale", "yscale"))):
        for scale in scales:
            getattr(axes, f"set_{scale}")("log")
        axes.legend(frameon=False, fontsize=8)
        tidy(axes)


SIZES = Shown(name="sizes", page="results.md", tables=_tables, verdicts=_verdicts, draw=_draw, size=(8.5, 3.4))
