"""Formats a memory plan as tables for people and as numbers for programs."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from swarm_plugins.block_io import kept_by_window
from swarm_plugins.offload.plan.plan import RUNTIME_BYTES, Planned
from swarm_plugins.offload.plan.sizes import ModelSizes
from swarm_plugins.offload.text import format_offload
from swarm_plugins.sizes import format_bytes
from swarm_plugins.weights.widths import Width


def print_plan(console: Console, planned: Planned) -> None:
    """Prints memory layout, expected speed, and the command to run."""
    plan, sizes, speeds = planned.plan, planned.plan.sizes, planned.plan.speeds
    name = str(sizes.dtype).removeprefix("torch.")
    console.print(_memory_table(planned))
    if sizes.published is not None:
        console.print(f"{sizes.published.widening}")
    console.print(_session(planned))
    link = f", RAM to {planned.device} {format_bytes(speeds.link_bytes_per_s)}/s" if speeds.link_bytes_per_s else ""
    console.print(
        f"disk {format_bytes(speeds.disk_bytes_per_s)}/s, {format_bytes(speeds.expert_bytes_per_s)}/s for "
        f"experts one after the other ({planned.disk_source}){link}; "
        f"the products of a token {speeds.step_s * 1e3:.0f} ms "
        f"(measured with {name} weights on {planned.device}{_widened(sizes)})\n"
    )
    console.print(_forecast_table(planned))
    console.print(
        "hits: as measured in answers to real text with 2 of 8 experts picked (fewer: as if even); in "
        "brackets: if every expert were equally likely at any time\n"
        "other widths: from a store that `swarm quantize` writes; products are taken to be as fast\n"
    )
    if plan.fits and not sizes.is_packed:
        console.print("Everything fits: transformers alone will do, offloading gains nothing.")
    elif not plan.fits:
        _print_line(console, f"Faster: {_faster(planned)}.")
    revision = ["--revision", planned.revision] if planned.revision else []
    where = ["--offload", format_offload(plan.config), "--device", planned.device]
    _print_line(console, shlex.join(["swarm", "run", planned.name, *revision, *where]))


def _widened(sizes: ModelSizes) -> str:
    return "" if sizes.published is None else ", packed ones in the form that they are given in memory"


def _print_line(console: Console, text: str) -> None:
    """Prints what users copy: on one line, and brackets in paths as they are."""
    console.print(text, soft_wrap=True, highlight=False, markup=False)


def _faster(planned: Planned) -> str:
    plan, other = planned.plan, planned.plan.faster_width
    full = (
        f"about {format_bytes(plan.full_memory_bytes)} of memory, which holds all experts "
        f"({plan.forecast.resident_tokens_per_s:.3g} tokens/s)"
    )
    if other is None:
        return full
    return (
        f"swarm quantize {shlex.quote(planned.name)} --out DIRECTORY --experts {other.expert_bits} "
        f"({other.forecast.tokens_per_s:.3g} instead of {plan.forecast.tokens_per_s:.3g} tokens/s), or {full}"
    )


def _memory_table(planned: Planned) -> Table:
    plan, sizes = planned.plan, planned.plan.sizes
    experts = sum(layer.num_experts for layer in sizes.layers)
    table = Table(title=escape(f"{planned.name} in {format_bytes(plan.memory_bytes)}"), title_justify="left")
    table.add_column("what", overflow="fold")
    for heading in ("size", "in fast memory"):
        table.add_column(heading, justify="right", overflow="fold")
    table.add_row(
        f"{experts} experts in {len(sizes.layers)} layers, each {format_bytes(sizes.largest_expert_bytes)}",
        format_bytes(sizes.expert_bytes),
        f"{format_bytes(plan.fast_bytes)} ({plan.forecast.fast_share:.0%})",
    )
    if plan.forecast.ram_share:
        table.add_row("  in pinned RAM", "", f"({plan.forecast.ram_share:.0%})")
    kept = "keys, values and states" if sizes.session.row_bytes else "keys and values"
    for what, size in (
        ("all other weights", sizes.other_bytes),
        (f"{kept} of {sizes.context_tokens} tokens", sizes.cache_bytes),
        ("activations, about", sizes.activation_bytes),
        ("Python and libraries, about", RUNTIME_BYTES),
    ):
        table.add_row(what, format_bytes(size), format_bytes(size))
    return table


def _session(planned: Planned) -> str:
    session = planned.plan.sizes.session
    wide = _token_bytes(session.token_bytes, session.window_token_bytes, session.window)
    told = f"on servers, a session takes {wide}"
    if session.row_bytes:
        told += f", and {format_bytes(session.row_bytes)} for the row: its states now and before the last step"
    coded = _token_bytes(session.coded_token_bytes, session.coded_window_token_bytes, session.window)
    return f"{told}; with --kv-bits 8, {coded}" if session.coded_token_bytes < session.token_bytes else told


def _token_bytes(whole: int, of_window: int, window: int) -> str:
    told = f"{format_bytes(whole)} for each token of a row"
    if not of_window:
        return told
    kept = f"the last {kept_by_window(window)}"
    return f"{told}, of which {'all' if of_window == whole else format_bytes(of_window)} only for {kept}"


def _forecast_table(planned: Planned) -> Table:
    plan = planned.plan
    table = Table(title="to expect of one sequence, once warm", title_justify="left")
    table.add_column("experts", overflow="fold")
    for heading in ("size", "in memory", "hits", "read per token", "tokens/s"):
        table.add_column(heading, justify="right", overflow="fold")
    bits = plan.sizes.expert_bits
    rows = [(bits, plan.sizes.expert_bytes, plan.forecast)]
    rows += [(other.expert_bits, other.expert_bytes, other.forecast) for other in plan.alternatives]
    for width, size, expected in rows:
        table.add_row(
            _width_text(plan.sizes, width),
            format_bytes(size),
            f"{expected.fast_share:.0%}",
            f"{expected.hit_ratio:.2f} ({expected.hit_ratio_even:.2f})",
            format_bytes(expected.read_bytes),
            f"{expected.tokens_per_s:.3g} ({expected.tokens_per_s_even:.3g})",
        )
    return table


def _width_text(sizes: ModelSizes, width: Width) -> str:
    told = f"{width}-bit" if isinstance(width, int) else width
    if width != sizes.expert_bits:
        return told
    return f"{told if sizes.published is None else sizes.published.widening.format}, as stored"


def as_dict(planned: Planned) -> dict[str, Any]:
    """Returns the plan as numbers, in bytes and seconds."""
    plan, published = planned.plan, planned.plan.sizes.published
    sizes = asdict(plan.sizes) | {
        "session": plan.sizes.session._asdict(),
        "published": None if published is None else asdict(published.widening),
        "dtype": str(plan.sizes.dtype).removeprefix("torch."),
        "expert_bytes": plan.sizes.expert_bytes,
        "token_bytes": plan.sizes.token_bytes,
    }
    return {
        "model": planned.name,
        "device": planned.device,
        "memory_bytes": plan.memory_bytes,
        "fits": plan.fits,
        "sizes": sizes,
        "speeds": asdict(plan.speeds) | {"disk_source": planned.disk_source},
        "config": asdict(plan.config),
        "offload": format_offload(plan.config),
        "forecast": asdict(plan.forecast),
        "alternatives": [asdict(other) for other in plan.alternatives],
    }
