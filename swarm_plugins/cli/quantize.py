"""``swarm quantize``: writes a model with experts in few bits, once, to be loaded many times."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swarm_plugins.cli.errors import one_sentence_errors
from swarm_plugins.cli.quiet import quiet_libraries
from swarm_plugins.errors import ConfigError

__all__ = ["quantize"]


def quantize(
    model: Annotated[str, typer.Argument(help="Mixture of experts: a directory, or its id on the Hub.")],
    out: Annotated[Path, typer.Option(help="Directory to make.")],
    experts: Annotated[int, typer.Option(metavar="BITS", help="Width of experts: 16, 8, 4, 3 or 2.")] = 4,
    attention: Annotated[
        int, typer.Option(metavar="BITS", help="Width of all other linear layers but the output head: 16, 8 or 4.")
    ] = 16,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the model.")] = None,
) -> None:
    """Write a model with experts in few bits to a directory: smaller on disk, and faster to read."""
    quiet_libraries()
    with one_sentence_errors("quantize"):
        from swarm_plugins.cli.sizes import format_bytes
        from swarm_plugins.offload.config import EXPERT_BITS, OTHER_BITS

        for option, bits, allowed in (("--experts", experts, EXPERT_BITS), ("--attention", attention, OTHER_BITS)):
            if bits not in allowed:
                raise ConfigError(f"{option} is {bits}; allowed are {', '.join(map(str, allowed))}")
        # What takes seconds to import comes after what may be wrong at once.
        from swarm_plugins.offload.quantizing import quantize_checkpoint

        size = quantize_checkpoint(model, out, expert_bits=experts, other_bits=attention, revision=revision)
        typer.echo(
            f"{out}: experts {format_bytes(size.expert_bytes)} at {experts} bits, the rest "
            f"{format_bytes(size.other_bytes)} at {attention} bits"
        )
