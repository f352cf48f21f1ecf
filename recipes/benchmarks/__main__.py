"""``python -m recipes.benchmarks``: a swarm, or offloading, compared with the same model in transformers."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from recipes.benchmarks.command import PROGRAM
from recipes.benchmarks.commands import changes, machines, mixtures, placements, swarms
from recipes.benchmarks.formats.command import formats
from recipes.benchmarks.mixture.command import mixture
from recipes.benchmarks.network.command import network
from recipes.benchmarks.packs.command import packs
from recipes.benchmarks.papers import command as papers
from recipes.benchmarks.widths.command import widths
from swarm_plugins.noise import no_bars_in_pipes

ROOT = Path(__file__).resolve().parents[2]

app = typer.Typer(
    help="Measure a swarm, or offloading, on this machine against the same model run locally, one thread a side.",
    no_args_is_help=True,
    add_completion=False,
)
for command in (
    *(swarms.decode, swarms.train, swarms.sessions, swarms.api, swarms.verify, packs, network),
    *(swarms.calls, swarms.curves),
    *(machines.kernels, widths, machines.device),
    *(mixtures.experts, mixtures.offload, mixture, mixtures.dispatch, mixtures.quality),
    *(formats, changes.codec, changes.kv, changes.together, changes.privacy),
    placements.placement,
):
    app.command()(command)
papers.add_commands(app)


def main() -> None:
    """Runs the command."""
    # Child processes find this folder too, whatever else is called ``recipes``.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    no_bars_in_pipes()
    app(prog_name=PROGRAM)


if __name__ == "__main__":
    main()
