"""``swarm quantize``: a model with experts in few bits, written once and loaded many times."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swarm_plugins.cli.support.arguments import Revision
from swarm_plugins.cli.support.output import one_sentence_errors
from swarm_plugins.noise import quiet_command

__all__ = ["quantize"]


def quantize(
    model: Annotated[str, typer.Argument(help="Mixture of experts: a directory, or its id on the Hub.")],
    out: Annotated[Path, typer.Option(help="Directory to make.")],
    experts: Annotated[str, typer.Option(metavar="BITS", help="Width of experts: 16, 8, 4, 3, 2 or nf4.")] = "4",
    attention: Annotated[
        str,
        typer.Option(metavar="BITS", help="Width of all other linear layers but the output head: 16, 8, 4 or nf4."),
    ] = "16",
    revision: Revision = None,
) -> None:
    """Write a model with experts in few bits to a directory: smaller on disk, and faster to read."""
    quiet_command()
    with one_sentence_errors("quantize"):
        from swarm_plugins.cli.support.options import parse_width
        from swarm_plugins.offload.widths import EXPERT_BITS, OTHER_BITS, width_text
        from swarm_plugins.sizes import format_bytes

        expert_bits = parse_width("--experts", experts, EXPERT_BITS)
        other_bits = parse_width("--attention", attention, OTHER_BITS)
        # What takes seconds to import comes after what may be wrong at once.
        from swarm_plugins.offload.quantizing import quantize_checkpoint

        size = quantize_checkpoint(model, out, expert_bits=expert_bits, other_bits=other_bits, revision=revision)
        typer.echo(
            f"{out}: experts {format_bytes(size.expert_bytes)} at {width_text(expert_bits)}, the rest "
            f"{format_bytes(size.other_bytes)} at {width_text(other_bits)}"
        )
