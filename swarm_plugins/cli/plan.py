"""``swarm plan`` and ``swarm quantize``: a model's memory and speed here, and its experts in few bits."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import typer

from swarm_plugins.cli.support.arguments import Model, Revision
from swarm_plugins.cli.support.output import one_sentence_errors, wide_console
from swarm_plugins.errors import ConfigError
from swarm_plugins.noise import quiet_command


def plan(
    model: Model,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Fast memory in all, such as 8GB. Default: most of what is free.")
    ] = None,
    ram: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="RAM for experts of a CUDA device. Default: most of the free."),
    ] = None,
    context: Annotated[int, typer.Option(min=1, max=1_000_000, help="Tokens that prompt and answer may have.")] = 2048,
    disk_rate: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Read per second. Default: measured on the model's own files.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where the model runs: cpu or cuda.")] = "cpu",
    revision: Revision = None,
    json: Annotated[bool, typer.Option("--json", help="Print numbers for programs.")] = False,
) -> None:
    """Show what fits where, the speed to expect and the settings to use, from the headers of a model's files."""
    quiet_command()
    with one_sentence_errors("plan"):
        memory_bytes, ram_bytes, disk_bytes_per_s = map(_bytes, (memory, ram, disk_rate))
        from swarm_plugins.model_names import check_model_name

        if disk_bytes_per_s is not None and disk_bytes_per_s < 1:
            raise ConfigError(f"invalid --disk-rate {disk_rate}: expected bytes per second, such as 500MB")
        check_model_name(model)
        # What takes seconds to import comes after what may be wrong at once.
        from swarm_plugins.cli.support.plan_table import as_dict, print_plan
        from swarm_plugins.offload.plan.plan import plan_model

        planned = plan_model(
            model,
            revision=revision,
            memory_bytes=memory_bytes,
            ram_bytes=ram_bytes,
            context_tokens=context,
            disk_bytes_per_s=disk_bytes_per_s,
            device=device,
        )
        if json:
            typer.echo(json_format.dumps(as_dict(planned), indent=1))
        else:
            print_plan(wide_console(), planned)


def _bytes(text: str | None) -> int | None:
    from swarm_plugins.sizes import parse_bytes

    return None if text is None else parse_bytes(text)


def quantize(
    model: Annotated[str, typer.Argument(help="Mixture of experts: a directory, or its id on the Hub.")],
    out: Annotated[Path, typer.Option(help="Directory to make.")],
    experts: Annotated[
        str, typer.Option(metavar="BITS", help="Width of experts: 16, 8, 4, 3, 2, nf4, 4dq, 3dq or 2dq.")
    ] = "4",
    attention: Annotated[
        str,
        typer.Option(metavar="BITS", help="Width of all other linear layers but the output head, one of the same."),
    ] = "16",
    revision: Revision = None,
) -> None:
    """Write a model with experts in few bits to a directory: smaller on disk, and faster to read."""
    quiet_command()
    with one_sentence_errors("quantize"):
        from swarm_plugins.model_names import check_model_name
        from swarm_plugins.offload.text import parse_width
        from swarm_plugins.sizes import format_bytes
        from swarm_plugins.weights.widths import width_text

        expert_bits = parse_width("--experts", experts)
        other_bits = parse_width("--attention", attention)
        check_model_name(model)
        # What takes seconds to import comes after what may be wrong at once.
        from swarm_plugins.offload.quantizing import quantize_checkpoint

        size = quantize_checkpoint(model, out, expert_bits=expert_bits, other_bits=other_bits, revision=revision)
        typer.echo(
            f"{out}: experts {format_bytes(size.expert_bytes)} at {width_text(expert_bits)} "
            f"({size.bits_per_expert_weight:.2f} bits a weight with scales), the rest "
            f"{format_bytes(size.other_bytes)} at {width_text(other_bits)}"
        )
