"""`merge_adapter`: an adapter and its base become one model in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from swarm_plugins.merging.finding import find_adapter, find_base
from swarm_plugins.merging.folder import write_folder
from swarm_plugins.merging.merged import MergedModel
from swarm_plugins.merging.places import check_free
from swarm_plugins.noise import quiet_transformers

FloatName = Literal["float32", "bfloat16", "float16"]


def merge_adapter(
    adapter: str | Path, out: str | Path, *, base: str | Path | None = None, dtype: FloatName | None = None
) -> Path:
    """Merges an adapter into its base and writes the model as a folder of safetensors.

    Weights are read, merged and written one module at a time. The result is what PEFT's ``merge_and_unload`` gives,
    to the bit; but where the base shares input and output embeddings and the adapter changes one of them, both are
    written.

    Args:
        adapter: A folder, or ``REPO[@TAG]`` on the Hub.
        out: The folder to write; it must not exist.
        base: A directory, or ``REPO[@REVISION]``. None: the one that the adapter names, in its version.
        dtype: Floating type of the weights. None: the base's; of one in few bits, the type that its config names.

    Returns:
        The folder.

    Raises:
        ConfigError: If ``out`` exists, the base is not found, or it is another one than the adapter was trained on.
        UnsupportedError: If the adapter cannot become part of the weights, or the base cannot be read in parts.
        CheckpointError: If adapter or base are damaged or do not fit each other.
        CapacityError: If the disk has no room for the model.
        HubError: If the Hub does not have the adapter or cannot be reached.
        OSError: If the folder cannot be written; nothing is left behind.
    """
    place, kind = Path(out).expanduser(), None if dtype is None else getattr(torch, dtype)
    check_free(place)
    found = find_adapter(adapter)
    with quiet_transformers():
        model = MergedModel(find_base(found, base), found, kind)
        write_folder(model, place, kind)
    return place
