"""`merge_adapter`: an adapter and its base become one model in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from swarm_plugins.errors import ConfigError
from swarm_plugins.merging.finding import find_adapter, find_base
from swarm_plugins.merging.folder import write_folder
from swarm_plugins.merging.llama_cpp.file import GgufType, write_gguf
from swarm_plugins.merging.llama_cpp.lora import write_lora
from swarm_plugins.merging.merged import MergedModel
from swarm_plugins.merging.places import check_place
from swarm_plugins.noise import quiet_transformers

FloatName = Literal["float32", "bfloat16", "float16"]


def merge_adapter(
    adapter: str | Path,
    out: str | Path,
    *,
    base: str | Path | None = None,
    dtype: FloatName | None = None,
    gguf: GgufType | None = None,
) -> Path:
    """Merges an adapter into its base and writes the model: as a folder of safetensors, or as a GGUF file.

    Weights are read, merged and written one module at a time. The result is what PEFT's ``merge_and_unload`` gives,
    to the bit; but where the base shares input and output embeddings and the adapter changes one of them, both are
    written. For GGUF, weights are merged in float32 and rounded once.

    Args:
        adapter: A folder, or ``REPO[@TAG]`` on the Hub.
        out: The folder, or the file NAME.gguf, to write; it must not exist.
        base: A directory, or ``REPO[@REVISION]``. None: the one that the adapter names, in its version.
        dtype: Floating type of the weights of a folder. None: the base's; of one in few bits, the type that its config
            names.
        gguf: Type of the weights of a GGUF file. None: a folder is written.

    Returns:
        The folder or file.

    Raises:
        ConfigError: If ``out`` exists or has the wrong suffix, the base is not found, or it is another one than the
            adapter was trained on.
        UnsupportedError: If the adapter cannot become part of the weights, the base cannot be read in parts, or GGUF
            has no place for it.
        CheckpointError: If adapter or base are damaged or do not fit each other.
        CapacityError: If the disk has no room for the model.
        HubError: If the Hub does not have the adapter or cannot be reached.
        MissingExtraError: If GGUF is asked for and gguf-py is not installed.
        OSError: If it cannot be written; nothing is left behind.
    """
    if gguf is not None and dtype is not None:
        raise ConfigError(f"dtype={dtype!r} and gguf={gguf!r} exclude each other: give one")
    place = check_place(out, is_gguf=gguf is not None)
    found = find_adapter(adapter)
    kind = None if dtype is None else getattr(torch, dtype)
    with quiet_transformers():
        checkpoint = find_base(found, base)
        if gguf is None:
            write_folder(MergedModel(checkpoint, found, kind), place, kind)
        else:
            write_gguf(MergedModel(checkpoint, found, torch.float32), place, gguf)
    return place


def lora_to_gguf(adapter: str | Path, out: str | Path, *, base: str | Path | None = None) -> Path:
    """Writes a LoRA as a GGUF file, which llama.cpp loads beside its base.

    Args:
        adapter: A folder, or ``REPO[@TAG]`` on the Hub.
        out: The file NAME.gguf to write; it must not exist.
        base: As for `merge_adapter`; of its weights nothing but the headers is read.

    Returns:
        The file.

    Raises:
        UnsupportedError: If the adapter is more than a plain LoRA of linear layers and experts, or llama.cpp does not
            know the base's type.
        ConfigError: As `merge_adapter`, and so are the other errors.
    """
    place = check_place(out, is_gguf=True)
    found = find_adapter(adapter)
    with quiet_transformers():
        write_lora(find_base(found, base), found, place)
    return place
