"""Whether an adapter can be carried over to another version of its base: what it tunes must be the same there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from safetensors import safe_open
from torch import nn

from swarm_plugins.backbone.version import base_blocks, base_checkpoint, base_layers
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.checkpoint.partition import num_blocks_of
from swarm_plugins.checkpoint.unchanged import is_unchanged_outside, unchanged_blocks
from swarm_plugins.errors import CheckpointError, ConfigError
from swarm_plugins.hub import AdapterFolder
from swarm_plugins.hub.folder import CONFIG_FILE, WEIGHTS_FILE
from swarm_plugins.hub.manifest import Manifest
from swarm_plugins.versions import ModelVersion

_MOST_BYTES = 1 << 30
"""Most bytes of blocks that are read of each version to compare them; of shards, the Hub's digests tell enough."""


class _Tuned(NamedTuple):
    """What an adapter's tensors belong to."""

    blocks: frozenset[int]
    is_outside: bool
    """Also modules outside of the blocks, such as the head."""
    is_prompt: bool
    """A prompt or prefix, which stands before all blocks."""


def check_unchanged(model: nn.Module, adapter: AdapterFolder, wanted: ModelVersion, **hub: Any) -> None:
    """Checks that everything an adapter tunes is the same in the model as in the version it was made for.

    Args:
        model: A model of transformers, or one of PEFT.
        adapter: The adapter.
        wanted: The version it was made for.
        hub: Address, token and cache of the Hub, as for `Checkpoint.open`.

    Raises:
        ConfigError: If something that it tunes has changed, or cannot be compared.
        CheckpointError: If files of a version cannot be read.
    """
    now = base_checkpoint(model, **hub)
    if now is None:
        raise ConfigError(f"{adapter.label} cannot be carried over: the weights of the model's base are not known")
    path = base_layers(model)
    tuned, every = _tuned(adapter, path), range(num_blocks_of(now.config))
    blocks = frozenset(every) if tuned.is_prompt else tuned.blocks
    if wanted.is_local:
        changed = _changed_here(model, adapter, blocks)
    else:
        then = Checkpoint.open(wanted.name, revision=wanted.revision, **hub)
        changed = sorted(blocks - unchanged_blocks(now, then, blocks, most_bytes=_MOST_BYTES))
    if changed:
        raise ConfigError(
            f"{adapter.label} cannot be carried over from {wanted} to {now.version}: it tunes blocks "
            f"{', '.join(map(str, changed))}, which are others there or too large to compare; train it on "
            "the new version, or pass on_mismatch='warn' to load it anyway"
        )
    if tuned.is_outside and (wanted.is_local or not is_unchanged_outside(now, then, most_bytes=_MOST_BYTES)):
        raise ConfigError(
            f"{adapter.label} cannot be carried over from {wanted} to {now.version}: it tunes modules outside of the "
            "blocks, whose weights are others there or not to be compared; train it on the new version, or pass "
            "on_mismatch='warn' to load it anyway"
        )


def _tuned(adapter: AdapterFolder, layer_path: str) -> _Tuned:
    config = json.loads((adapter.folder / CONFIG_FILE).read_bytes())
    saved = config.get("modules_to_save") or ()
    inside = re.compile(rf"(?:^|\.){re.escape(layer_path)}\.(\d{{1,6}})\.")
    blocks, outside, is_prompt = set(), False, False
    for name in _names(adapter):
        if found := inside.search(name):
            blocks.add(int(found[1]))
        elif name.startswith("prompt_"):
            is_prompt = True
        elif not any(part in saved for part in name.split(".")):
            # Modules to save come whole: what the base has in their place makes no difference.
            outside = True
    return _Tuned(frozenset(blocks), outside, is_prompt)


def _names(adapter: AdapterFolder) -> Iterator[str]:
    with safe_open(adapter.folder / WEIGHTS_FILE, "pt") as file:
        yield from file.keys()


def _changed_here(model: nn.Module, adapter: AdapterFolder, blocks: frozenset[int]) -> list[int]:
    """Returns the blocks that differ from a directory which need not be there any more: by samples of their bytes."""
    manifest = Manifest.read(adapter.folder)
    before, now = () if manifest is None else manifest.block_fingerprints, base_blocks(model)
    if not before or not now:
        raise CheckpointError(
            f"{adapter.label} was made for a directory, and there are no fingerprints of the blocks of both bases: it "
            "cannot be told whether they are the same; load exactly that base, or pass on_mismatch='warn'"
        )
    return [block for block in sorted(blocks) if before[block : block + 1] != now[block : block + 1]]
