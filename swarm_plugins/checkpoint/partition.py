"""Which tensors of a checkpoint belong to which block, and which to the client.

The layer list of a model is found by the class that HF names in ``_no_split_modules``, never by an attribute's
name. Checkpoints spell the path to it with or without the base model's prefix (``model.layers.3.`` or
``layers.3.``), depending on the class that saved them; both are understood.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from torch import nn

from swarm_plugins.checkpoint.fingerprint import tensors_fingerprint
from swarm_plugins.checkpoint.source import Checkpoint
from swarm_plugins.errors import CheckpointError, ConfigError, UnsupportedError


def layer_list_name(model: nn.Module) -> str:
    """Returns the dotted path of the list of decoder layers, such as ``model.layers``.

    Raises:
        UnsupportedError: If the model has no such list, or several.
    """
    classes = {str(name) for name in getattr(model, "_no_split_modules", None) or ()}
    found: list[str] = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and all(_is_any(layer, classes) for layer in module)
    ]
    if len(found) == 1:
        return found[0]
    what = f"{type(model).__name__} has {len(found)} lists of decoder layers ({', '.join(found) or 'none'})"
    raise UnsupportedError(
        f"{what} of the classes {', '.join(sorted(classes)) or '(none named)'} in _no_split_modules; exactly one is "
        "supported, as in decoder-only language models"
    )


def _is_any(module: nn.Module, classes: set[str]) -> bool:
    # The whole ancestry: a converted layer has a class of its own, derived from HF's.
    return any(ancestor.__name__ in classes for ancestor in type(module).__mro__)


def find_layers(model: nn.Module) -> nn.ModuleList:
    """Returns the list of decoder layers.

    Raises:
        UnsupportedError: If the model has no such list, or several.
    """
    layers = model.get_submodule(layer_list_name(model))
    if not isinstance(layers, nn.ModuleList):
        raise UnsupportedError(f"the decoder layers of {type(model).__name__} are a {type(layers).__name__}")
    return layers


def layer_prefix(checkpoint: Checkpoint, layer_path: str) -> str:
    """Returns what precedes a block's index in the checkpoint's names, such as ``model.layers.``.

    Raises:
        CheckpointError: If no tensor matches the layer list, or tensors under several paths do.
    """
    # The model's own spelling, then without leading parts (saved from a base model), then with more of them.
    parts = layer_path.split(".")
    for start in range(len(parts)):
        prefix = ".".join(parts[start:]) + "."
        if any(_index_of(name, prefix) is not None for name in checkpoint.tensors):
            return prefix
    longer = re.compile(rf"(.+\.{re.escape(layer_path)}\.)\d+\.")
    prefixes = {match[1] for name in checkpoint.tensors if (match := longer.match(name))}
    if len(prefixes) == 1:
        return prefixes.pop()
    found = f"the candidates {', '.join(sorted(prefixes))}" if prefixes else ", ".join(list(checkpoint.tensors)[:3])
    raise CheckpointError(
        f"{checkpoint.name} has no tensors named '{layer_path}.<index>.': found {found}; config and weights do not "
        "belong together"
    )


def block_tensors(checkpoint: Checkpoint, layer_path: str, blocks: range) -> list[str]:
    """Returns the names of the tensors of some blocks, in the checkpoint's spelling and order.

    Raises:
        ConfigError: If the model does not have these blocks.
        CheckpointError: If a block has no tensor.
    """
    num_blocks = _num_blocks(checkpoint)
    if blocks and (min(blocks) < 0 or max(blocks) >= num_blocks):
        raise ConfigError(
            f"blocks {blocks.start} to {blocks.stop} are asked of {checkpoint.name}, which has blocks 0 to {num_blocks}"
        )
    prefix = layer_prefix(checkpoint, layer_path)
    by_block = _by_block(checkpoint.tensors, prefix)
    empty = [block for block in blocks if not by_block[block]]
    if empty:
        raise CheckpointError(
            f"{checkpoint.name} has no tensor of block {', '.join(map(str, empty))} (names starting with "
            f"{prefix}{empty[0]}.): the checkpoint is incomplete, fetch it again"
        )
    return [name for block in blocks for name in by_block[block]]


def client_tensors(checkpoint: Checkpoint, layer_path: str) -> list[str]:
    """Returns the names of the tensors outside of all blocks: embeddings, final norm, head.

    Layers beyond the model's own (DeepSeek's extra prediction layers) are left out.

    Raises:
        CheckpointError: If the checkpoint has no blocks.
    """
    prefix = layer_prefix(checkpoint, layer_path)
    return [name for name in checkpoint.tensors if _index_of(name, prefix) is None]


def block_fingerprints(checkpoint: Checkpoint, layer_path: str) -> tuple[str, ...]:
    """Returns the identity of each block of a directory: 40 hexadecimal digits, from a sample of its tensors' bytes.

    Tells which blocks of two fine-tunes differ. Empty for a checkpoint on the Hub, whose commit covers every byte.

    Raises:
        CheckpointError: If a block has no tensor, or a file cannot be read.
    """
    directory = checkpoint.directory
    if directory is None:
        return ()
    prefix = layer_prefix(checkpoint, layer_path)
    found = []
    for block in range(_num_blocks(checkpoint)):
        names = block_tensors(checkpoint, layer_path, range(block, block + 1))
        # Without prefix and index: equal blocks have equal fingerprints, wherever they stand.
        inside = {name.removeprefix(f"{prefix}{block}."): checkpoint.tensors[name] for name in names}
        found.append(tensors_fingerprint(directory, inside))
    return tuple(found)


def _num_blocks(checkpoint: Checkpoint) -> int:
    return int(checkpoint.config.get_text_config(decoder=True).num_hidden_layers)


def _index_of(name: str, prefix: str) -> int | None:
    if not name.startswith(prefix):
        return None
    index = name[len(prefix) :].partition(".")[0]
    return int(index) if index.isascii() and index.isdigit() and len(index) <= 6 else None


def _by_block(names: Iterable[str], prefix: str) -> defaultdict[int, list[str]]:
    by_block: defaultdict[int, list[str]] = defaultdict(list)
    for name in names:
        index = _index_of(name, prefix)
        if index is not None:
            by_block[index].append(name)
    return by_block
