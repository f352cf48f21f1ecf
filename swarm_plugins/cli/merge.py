"""``swarm merge``: an adapter and its base become one model, for programs that know neither PEFT nor a swarm."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from swarm_plugins.cli.support.output import one_sentence_errors
from swarm_plugins.errors import ConfigError
from swarm_plugins.noise import quiet_command

DTYPES = ("float32", "bfloat16", "float16")
GGUF_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")


def merge(
    adapter: Annotated[str, typer.Argument(metavar="DIR|REPO[@TAG]", help="Adapter, from a folder or the Hub.")],
    out: Annotated[Path, typer.Option(help="Folder to make, or file NAME.gguf.")],
    base: Annotated[
        str | None,
        typer.Option(metavar="DIR|REPO[@REVISION]", help="Its base. Default: the one that it names."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="|".join(DTYPES), help="Type of a folder's weights. Default: the base's.")
    ] = None,
    gguf: Annotated[
        str | None, typer.Option(metavar="|".join(GGUF_TYPES), help="Write a GGUF file with weights of this type.")
    ] = None,
    gguf_lora: Annotated[
        bool, typer.Option("--gguf-lora", help="Do not merge: write the LoRA as GGUF, to load beside its base.")
    ] = False,
) -> None:
    """Merge an adapter into its base: a model for transformers, vLLM, llama.cpp, Ollama and others."""
    quiet_command()
    with one_sentence_errors("merge"):
        kind: Any = _one_of("--dtype", dtype, DTYPES)
        gguf_kind: Any = _one_of("--gguf", gguf, GGUF_TYPES)
        given = {"--dtype": kind, "--gguf": gguf_kind, "--gguf-lora": gguf_lora}
        if len(typed := [option for option, value in given.items() if value]) > 1:
            raise ConfigError(f"{' and '.join(typed)} exclude each other: give one")
        # What takes seconds to import comes after what may be wrong at once.
        from swarm_plugins.merging.places import check_place

        check_place(out, is_gguf=bool(gguf_kind or gguf_lora))
        from swarm_plugins.merging import lora_to_gguf, merge_adapter

        if gguf_lora:
            typer.echo(f"{lora_to_gguf(adapter, out, base=base)}: {adapter}, to load beside its base")
        else:
            merged = merge_adapter(adapter, out, base=base, dtype=kind, gguf=gguf_kind)
            typer.echo(f"{merged}: {adapter} merged into its base")


def _one_of(option: str, value: str | None, known: tuple[str, ...]) -> str | None:
    """Returns a choice in the known spelling; raises ConfigError if there is none."""
    found = next((one for one in known if value is not None and one.lower() == value.lower()), None)
    if value is not None and found is None:
        raise ConfigError(f"invalid {option} {value!r}: expected {', '.join(known)}")
    return found
