"""``swarm merge``: an adapter and its base become one model, for programs that know neither PEFT nor a swarm."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarm_plugins.cli.support.output import one_sentence_errors
from swarm_plugins.errors import ConfigError
from swarm_plugins.noise import quiet_command

if TYPE_CHECKING:
    from swarm_plugins.merging.merge import FloatName

_DTYPES: tuple[FloatName, ...] = ("float32", "bfloat16", "float16")


def merge(
    adapter: Annotated[str, typer.Argument(metavar="DIR|REPO[@TAG]", help="Adapter, from a folder or the Hub.")],
    out: Annotated[Path, typer.Option(help="Folder to make.")],
    base: Annotated[
        str | None,
        typer.Option(metavar="DIR|REPO[@REVISION]", help="Its base. Default: the one that it names."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="|".join(_DTYPES), help="Type of the weights. Default: the base's.")
    ] = None,
) -> None:
    """Merge an adapter into its base: a model for transformers, vLLM and others, as a folder of safetensors."""
    quiet_command()
    with one_sentence_errors("merge"):
        kind = next((one for one in _DTYPES if one == dtype), None)
        if dtype is not None and kind is None:
            raise ConfigError(f"invalid --dtype {dtype!r}: expected {', '.join(_DTYPES)}")
        from swarm_plugins.merging.places import check_free

        check_free(out)
        # What takes seconds to import comes after what may be wrong at once.
        from swarm_plugins.merging import merge_adapter

        typer.echo(f"{merge_adapter(adapter, out, base=base, dtype=kind)}: {adapter} merged into its base")
