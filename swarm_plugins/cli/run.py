"""``swarm run``: talks with a mixture-of-experts model that need not fit in memory, on this machine alone."""

from __future__ import annotations

from typing import Annotated

import typer

from swarm_plugins.cli.support.errors import one_sentence_errors
from swarm_plugins.cli.support.wording import OFFLOAD_WORDS
from swarm_plugins.noise import quiet_command

__all__ = ["run"]


def run(
    model: Annotated[str, typer.Argument(help="Model: a directory, or its id on the Hub.")],
    offload: Annotated[
        str,
        typer.Option(
            metavar="fast=SIZE,...",
            help="Where experts are kept: fast=SIZE, ram=SIZE, bits=8|4|3|2|nf4, other-bits=8|4|nf4, "
            "prefetch=auto|on|off, pinned=SHARE, readers=N, each optional. Default: what is free; `swarm plan` says "
            "what to give.",
        ),
    ] = "",
    prompt: Annotated[
        list[str] | None, typer.Option(help="Answer this and leave; repeatable, for turns of one conversation.")
    ] = None,
    adapter: Annotated[
        str | None, typer.Option(metavar="DIR|REPO[@TAG]", help="Adapter to talk with, from a folder or the Hub.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the model.")] = None,
    device: Annotated[str | None, typer.Option(help="Where the model runs. Default: a CUDA device if any.")] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told at the start.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest word.")] = 0.7,
) -> None:
    """Talk with a model whose experts stay on disk but for a bounded set. /exit leaves, /new starts afresh."""
    quiet_command()
    with one_sentence_errors("run", OFFLOAD_WORDS):
        from swarm_plugins.cli.support.offload_option import parse_offload

        config = parse_offload(offload)
        # What takes seconds to import comes after what may be wrong at once.
        from swarm_plugins.talk.offloaded import run_model

        run_model(
            model,
            config,
            prompts=prompt or [],
            adapter=adapter,
            revision=revision,
            device=device,
            system=system,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
        )
