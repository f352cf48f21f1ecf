"""``swarm demo-model``: makes the model of the demonstration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swarm_plugins.cli.support.errors import one_sentence_errors
from swarm_plugins.noise import quiet_command

__all__ = ["demo_model"]


def demo_model(
    variant: Annotated[str, typer.Option(help="Experts x neurons: 4x1536 (exact) or 8x1152.")] = "4x1536",
    out: Annotated[Path | None, typer.Option(help="Folder to write to. Default: the cache.", file_okay=False)] = None,
    seed: Annotated[int, typer.Option(help="Of the routers.", min=0)] = 0,
) -> None:
    """Make a real mixture-of-experts model from SmolLM2-135M-Instruct: an ordinary checkpoint in Mixtral's format."""
    quiet_command()
    with one_sentence_errors("demo-model"):
        from swarm_plugins.demo.model import default_folder, find_variant
        from swarm_plugins.demo.model import demo_model as make

        chosen = find_variant(variant)
        folder = default_folder(chosen) if out is None else out
        built = make(chosen, folder, seed=seed)
        typer.echo(
            f"{folder}: {built.variant}, loss {built.loss:.4f} (dense model {built.dense_loss:.4f}), logits differ by "
            f"at most {built.logit_difference:.1e}, use of the experts even to {built.load_entropy:.2f} of 1"
        )
