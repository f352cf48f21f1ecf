"""Which tensors of a checkpoint belong to which block, and which to the client.

The layer list of a model is found by the class that HF names in ``_no_split_modules``, or by its length where none is
named, never by an attribute's name. Checkpoints spell the path to it with or without the base model's prefix
(``model.layers.3.`` or ``layers.3.``), depending on the class that saved them; both are understood. Where there are
other lists as well, such as a vision tower's, transformers' own rules for renaming tell which one is the decoder's.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from swarm_plugins.checkpoint.conversions import Conversions
from swarm_plugins.checkpoint.headers import TensorInfo
from swarm_plugins.checkpoint.outline import meta_model
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
    if not classes:
        found = [name for name, module in model.named_modules() if _is_like_layers(module, model)]
    if len(found) > 1:
        found = _in_decoder(model, found) or _of_same_config(model, found) or found
    if len(found) == 1:
        return found[0]
    what = f"{type(model).__name__} has {len(found)} lists of decoder layers ({', '.join(found) or 'none'})"
    raise UnsupportedError(
        f"{what} of the classes {', '.join(sorted(classes)) or '(none named)'} in _no_split_modules; exactly one is "
        "supported, as in decoder-only language models"
    )


def _in_decoder(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Returns which modules are in the language model of one that takes images or sound as well."""
    decoder = model.get_decoder() if isinstance(model, PreTrainedModel) else None
    # One config for both: the decoder is not a language model by itself, but half of an encoder-decoder.
    if decoder is None or type(decoder.config) is type(model.config):
        return []
    inside = {id(module) for module in decoder.modules()}
    return [name for name in names if id(model.get_submodule(name)) in inside]


def _of_same_config(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Returns which lists belong to modules with the model's own config, as towers beside the decoder do not (GIT)."""
    owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in names}
    return [name for name, owner in owners.items() if getattr(owner, "config", None) is getattr(model, "config", owner)]


def _is_like_layers(module: nn.Module, model: nn.Module) -> bool:
    """Returns whether a module is a list of as many equal modules as the model has layers; for the oldest families."""
    num_layers = getattr(getattr(model, "config", None), "num_hidden_layers", 0)
    if not isinstance(module, nn.ModuleList) or not 0 < len(module) == num_layers:
        return False
    # Converted layers have classes of their own, derived from HF's.
    shared = set.intersection(*(set(type(layer).__mro__) for layer in module)) - set(nn.Module.__mro__)
    return bool(shared) and next(module.parameters(), None) is not None


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


def decoder_of(model: nn.Module, layer_path: str) -> PreTrainedModel:
    """Returns the innermost model that the layer list at a path belongs to."""
    parts = layer_path.split(".")[:-1]
    owners = (model.get_submodule(".".join(parts[:end])) for end in range(len(parts), -1, -1))
    return next(owner for owner in owners if isinstance(owner, PreTrainedModel))


def layer_prefix(checkpoint: Checkpoint, layer_path: str) -> str:
    """Returns what precedes a block's index in the checkpoint's names, such as ``model.layers.``.

    Raises:
        CheckpointError: If no tensor matches the layer list, or tensors under several paths do, or the config has
            fewer kinds of layers than there are blocks.
    """
    prefixes = _PREFIXES.setdefault(checkpoint, {})
    if layer_path not in prefixes:
        prefix = _find_prefix(checkpoint, layer_path)
        _check_counted(checkpoint, prefix)
        prefixes[layer_path] = prefix
    return prefixes[layer_path]


_PREFIXES: WeakKeyDictionary[Checkpoint, dict[str, str]] = WeakKeyDictionary()


def _find_prefix(checkpoint: Checkpoint, layer_path: str) -> str:
    # The model's own spelling, then without leading parts (saved from a base model), then others.
    parts = layer_path.split(".")
    for start in range(len(parts)):
        prefix = ".".join(parts[start:]) + "."
        if any(_index_of(name, prefix) is not None for name in checkpoint.tensors):
            return prefix
    examples: dict[str, str] = {}
    for name in checkpoint.tensors:
        if match := _IN_LIST.match(name):
            examples.setdefault(match[1], name)
    longer = [prefix for prefix in examples if prefix.endswith(f".{layer_path}.")]
    found = longer if len(longer) == 1 else _of_decoder(checkpoint, parts[-1], examples)
    if len(found) == 1:
        return found[0]
    some = f"the candidates {', '.join(sorted(examples))}" if examples else ", ".join(list(checkpoint.tensors)[:3])
    raise CheckpointError(
        f"{checkpoint.name} has no tensors named '{layer_path}.<index>.': found {some}; config and weights do not "
        "belong together"
    )


_IN_LIST = re.compile(r"(.+?\.)\d{1,6}\.")
"""A tensor of a module in a list: all up to the index."""
_LISTED = re.compile(r".+\.\d{1,6}")
"""A tensor that is in a list itself."""


def _of_decoder(checkpoint: Checkpoint, list_name: str, examples: Mapping[str, str]) -> list[str]:
    """Returns the prefixes whose tensors transformers loads into the decoder layers of the causal language model.

    Args:
        checkpoint: The checkpoint.
        list_name: Name that the list of layers must have in the model.
        examples: One tensor's name for each prefix.
    """
    outline = meta_model(checkpoint.config, torch.float32)
    conversions, path = Conversions(outline), layer_list_name(outline)
    if path.rpartition(".")[2] != list_name:
        return []
    targets = ((prefix, conversions.target(name)[0]) for prefix, name in examples.items())
    return [prefix for prefix, to in targets if to.startswith(f"{path}.") and conversions.is_known(to)]


def places_in_blocks(checkpoint: Checkpoint, layer_path: str) -> Mapping[str, str]:
    """Returns where the tensors of all blocks belong, by name: below the layer list, such as ``3.mlp.gate.weight``.

    Some checkpoints keep one weight of all blocks in a list of its own. Transformers' rules tell where those belong.

    Raises:
        CheckpointError: If no tensor matches the layer list, or tensors under several paths do.
    """
    known = _PLACES.setdefault(checkpoint, {})
    if layer_path not in known:
        prefix = layer_prefix(checkpoint, layer_path)
        inside = {name: name[len(prefix) :] for name in checkpoint.tensors if _index_of(name, prefix) is not None}
        known[layer_path] = inside | _places_elsewhere(checkpoint, prefix)
    return known[layer_path]


_PLACES: WeakKeyDictionary[Checkpoint, dict[str, Mapping[str, str]]] = WeakKeyDictionary()


def _places_elsewhere(checkpoint: Checkpoint, prefix: str) -> dict[str, str]:
    names = [name for name in checkpoint.tensors if _LISTED.fullmatch(name) and not name.startswith(prefix)]
    if not names:
        return {}
    outline = meta_model(checkpoint.config, torch.float32)
    conversions, path = Conversions(outline), f"{layer_list_name(outline)}."
    targets = {name: conversions.target(name)[0] for name in names}
    return {
        name: to.removeprefix(path) for name, to in targets.items() if to.startswith(path) and conversions.is_known(to)
    }


def _check_counted(checkpoint: Checkpoint, prefix: str) -> None:
    """Refuses weights of more blocks than a config has that counts its list of kinds (Nemotron-H).

    One that says a number may leave out what follows: layers that predict further tokens.
    """
    config = checkpoint.config.get_text_config(decoder=True)
    if not isinstance(getattr(type(config), "num_hidden_layers", None), property):
        return
    number, indices = num_blocks_of(config), (_index_of(name, prefix) for name in checkpoint.tensors)
    last = max((index for index in indices if index is not None), default=-1)
    if last >= number:
        raise CheckpointError(
            f"{checkpoint.name} has {number} layers by its config and weights of {last + 1} blocks: "
            "correct the list of layers in config.json, or fetch both again"
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
    by_block = _by_block(places_in_blocks(checkpoint, layer_path))
    empty = [block for block in blocks if not by_block[block]]
    if empty:
        prefix = layer_prefix(checkpoint, layer_path)
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
    places = places_in_blocks(checkpoint, layer_path)
    return [name for name in checkpoint.tensors if name not in places]


def stored_block(checkpoint: Checkpoint, layer_path: str, block: int) -> dict[str, TensorInfo]:
    """Returns the tensors of a block by where they belong in it, such as ``mlp.gate.weight``; see `block_tensors`."""
    places = places_in_blocks(checkpoint, layer_path)
    names = block_tensors(checkpoint, layer_path, range(block, block + 1))
    return {places[name].partition(".")[2]: checkpoint.tensors[name] for name in names}


def _num_blocks(checkpoint: Checkpoint) -> int:
    return num_blocks_of(checkpoint.config)


def num_blocks_of(config: PreTrainedConfig) -> int:
    """Returns the number of decoder layers that a config names.

    Raises:
        UnsupportedError: If it names none.
    """
    config = config.get_text_config(decoder=True)
    # Where layers have several attentions, the latter counts these.
    found = getattr(config, "num_layers", None) or getattr(config, "num_hidden_layers", None)
    if not isinstance(found, int):
        raise UnsupportedError(
            f"the config of model_type {config.model_type!r} has no number of decoder layers: use a decoder-only model"
        )
    return found


def _index_of(name: str, prefix: str) -> int | None:
    if not name.startswith(prefix):
        return None
    index = name[len(prefix) :].partition(".")[0]
    return int(index) if index.isascii() and index.isdigit() and len(index) <= 6 else None


def _by_block(places: Mapping[str, str]) -> defaultdict[int, list[str]]:
    by_block: defaultdict[int, list[str]] = defaultdict(list)
    for name, place in places.items():
        by_block[int(place.partition(".")[0])].append(name)
    return by_block
