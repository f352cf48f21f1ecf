"""Fills HF's own class with tensors that are in memory, by transformers' own loading and its conversions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from swarm_plugins.errors import CheckpointError, UnsupportedError
from swarm_plugins.noise import quiet_transformers

__all__ = ["model_from_tensors"]


def model_from_tensors(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    tensors: dict[str, Tensor],
    dtype: torch.dtype,
    name: str,
) -> PreTrainedModel:
    """Returns a model in evaluation mode.

    Args:
        model_class: HF's class, or one that constructs less of it.
        config: Its config.
        tensors: All its weights, under the checkpoint's names.
        dtype: Floating type of the weights.
        name: The checkpoint's, for messages.

    Raises:
        CheckpointError: If a tensor is missing or has a wrong shape.
    """
    try:
        # HF reports what errors here say, and shows a bar for tensors converted in memory.
        with quiet_transformers():
            loaded: Any = model_class.from_pretrained(
                None,
                config=config,
                state_dict=tensors,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except UnsupportedError:
        raise  # the class's own word; a RuntimeError too
    except RuntimeError as exc:
        raise CheckpointError(f"{name} has tensors that do not fit its config: {exc}") from exc
    model: PreTrainedModel = loaded[0]
    info: dict[str, Any] = loaded[1]
    wrong = sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in info["mismatched_keys"])
    if wrong:
        raise CheckpointError(f"{name} has {len(wrong)} tensors of a wrong shape, such as {wrong[0]}: not its config")
    missing = sorted(info["missing_keys"])
    if missing:
        raise CheckpointError(f"{name} lacks {len(missing)} tensors, such as {missing[0]}: fetch it again")
    model.train(False)
    return model
