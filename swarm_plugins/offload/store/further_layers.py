"""Layers that a checkpoint has beyond those of its config: a config cut short, or layers for predicting further tokens.

DeepSeek-V3, GLM-4.5 and others append such layers (multi-token prediction, DeepSeek-V3 report, section 2.2) to their
decoder layers; transformers leaves them out when it loads the model.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

from transformers import PreTrainedModel

from swarm_plugins.checkpoint import find_layers, layer_list_name
from swarm_plugins.errors import CheckpointError

__all__ = ["check_further_layers"]


def check_further_layers(model: PreTrainedModel, names: Mapping[str, str]) -> None:
    """Refuses weights of more layers than the model has: without them it would answer, but nonsense.

    Args:
        model: The model that the config describes, on the meta device will do.
        names: What transformers makes of the name of each tensor of the checkpoint.

    Raises:
        CheckpointError: If there are decoder layers beyond the model's own; names a tensor.
    """
    num_layers = len(find_layers(model))
    layers = _by_layer(names, layer_list_name(model))
    own = {suffix for index in range(num_layers) for suffix in layers.get(index, {})}
    predicting = range(num_layers, num_layers + _num_predicting(model))
    further = {}
    for index in sorted(index for index in layers if index >= num_layers):
        # What joins the hidden state with the next token's embedding is in no decoder layer.
        if index in predicting and not layers[index].keys() <= own:
            continue
        found = [name for name in layers[index].values() if not _is_left_out(model, name, names[name])]
        if found:
            further[index] = found[0]
    if further:
        raise CheckpointError(
            f"config.json says num_hidden_layers {num_layers}, but the checkpoint has weights of "
            f"{num_layers + len(further)} layers, such as {next(iter(further.values()))}: correct config.json, or "
            "fetch the checkpoint again"
        )


def _by_layer(names: Mapping[str, str], path: str) -> dict[int, dict[str, str]]:
    """Returns, by index of the layer and the rest of the name, the tensors of all layers."""
    *_, last = path.rpartition(".")
    # Saved from a base model, names lack the beginning of the path.
    pattern = re.compile(rf"(?:{re.escape(path)}|{re.escape(last)})\.([0-9]{{1,6}})\.(.+)")
    layers: defaultdict[int, dict[str, str]] = defaultdict(dict)
    for name, renamed in names.items():
        match = pattern.fullmatch(renamed)
        if match:
            layers[int(match[1])][match[2]] = name
    return layers


def _num_predicting(model: PreTrainedModel) -> int:
    config = model.config.get_text_config(decoder=True)
    found = getattr(config, "num_mtp_layers", None) or getattr(config, "num_nextn_predict_layers", None)
    return found if isinstance(found, int) else 0


def _is_left_out(model: PreTrainedModel, *names: str) -> bool:
    """Says whether transformers leaves a tensor of this model's family out without a word."""
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    return any(re.search(pattern, name) for pattern in patterns for name in names)
