"""Which layers a student keeps, and the config of a model that has only these."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedConfig

from swarm_plugins.errors import ConfigError

# Lists that may be as long as the model is deep by chance.
_NOT_PER_LAYER = ("_token_id", "_token_ids", "_tokens", "_step_limit", "architectures")
# Lists of layer indices end like this, as Qwen's mlp_only_layers; Llama 4 has one of flags named alike.
_INDEX_LISTS = ("_layers", "_idxs", "_layer_ids", "_indices")
_FLAG_LISTS = ("no_rope_layers",)
# Settings that hold an index of a layer: the layers below it are of one kind, the others of another.
_FIRST_OF_A_KIND = ("first_k_dense_replace", "max_window_layers")


def kept_layers(num_layers: int, keep_layers: Sequence[int] | None, depth: int | None) -> tuple[int, ...]:
    """Returns the indices of the layers to keep, in order.

    Args:
        num_layers: Layers of the teacher.
        keep_layers: The indices; negative ones count from the end.
        depth: Or how many: evenly spread, with the first and the last layer.

    Raises:
        ConfigError: If not exactly one of the two is given, or it does not fit the teacher.
    """
    if (keep_layers is None) == (depth is None):
        raise ConfigError(
            f"keep_layers={keep_layers!r} and depth={depth!r}: give one of them, such as depth={max(1, num_layers - 1)}"
        )
    if depth is not None:
        if not 1 <= depth <= num_layers:
            raise ConfigError(
                f"depth={depth} must lie from 1 to {num_layers}, the number of layers of the teacher; to add layers, "
                "train a deeper model"
            )
        steps = max(depth - 1, 1)
        return tuple(round(index * (num_layers - 1) / steps) for index in range(depth))
    kept = list(keep_layers or ())
    wrong = [one for one in kept if not -num_layers <= one < num_layers]
    if not kept or wrong:
        what = f"layer {wrong[0]} does not exist" if wrong else "no layer is kept"
        raise ConfigError(f"keep_layers={kept}: {what}; the teacher has layers 0 to {num_layers - 1}")
    indices = [one % num_layers for one in kept]
    if indices != sorted(set(indices)):
        raise ConfigError(f"keep_layers={kept} must name each layer once, in ascending order: {sorted(set(indices))}")
    return tuple(indices)


def cut_config(config: PreTrainedConfig, kept: Sequence[int]) -> PreTrainedConfig:
    """Returns a copy of a config for a model that has only some of the layers.

    Lists with one entry per layer are cut, lists of layer indices renumbered.
    """
    cut = copy.deepcopy(config)
    text = cut.get_text_config(decoder=True)
    num_layers = int(text.num_hidden_layers)
    text.num_hidden_layers = len(kept)
    for name, value in list(vars(text).items()):
        changed = _cut(name, value, num_layers, kept)
        if changed is not value:
            setattr(text, name, changed)
    # The name would make tools take the student for its teacher.
    cut._name_or_path = ""
    return cut


def _cut(name: str, value: Any, num_layers: int, kept: Sequence[int]) -> Any:
    if name in _FIRST_OF_A_KIND and isinstance(value, int):
        return sum(index < value for index in kept)
    if not isinstance(value, list | tuple) or name.endswith(_NOT_PER_LAYER) or name.startswith("_"):
        return value
    if _holds_indices(name, value, num_layers):
        return type(value)(new for new, old in enumerate(kept) if old in value)
    return type(value)(value[index] for index in kept) if len(value) == num_layers else value


def _holds_indices(name: str, value: Sequence[Any], num_layers: int) -> bool:
    return (
        name.endswith(_INDEX_LISTS)
        and name not in _FLAG_LISTS
        and all(isinstance(one, int) and 0 <= one < num_layers for one in value)
        and list(value) == sorted(set(value))
    )
