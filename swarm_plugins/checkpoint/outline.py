"""A model without storage, built from a config that may come from anyone: what is wrong with it is one error."""

from __future__ import annotations

import copy

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)

from swarm_plugins.checkpoint.loading import CONSTRUCTION, class_for_task, config_for
from swarm_plugins.errors import CheckpointError, UnsupportedError, one_line


def build_outline(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype, name: str
) -> PreTrainedModel:
    """Returns a model on the meta device.

    Raises:
        CheckpointError: If the config is wrong.
        UnsupportedError: If the model needs a package that is not installed.
    """
    try:
        with CONSTRUCTION, torch.device("meta"):
            model: PreTrainedModel = model_class._from_config(copy.deepcopy(config), dtype=dtype)
    except ImportError as exc:
        raise UnsupportedError(
            f"{name}: HF's {model_class.__name__} needs another package ({one_line(exc, with_kind=True)}): "
            "install it, or remove the setting that asks for it from config.json"
        ) from exc
    except Exception as exc:
        # Any kind, from any line of HF's model that meets an unexpected number.
        raise CheckpointError(
            f"{name}: HF's {model_class.__name__} cannot be made of its config ({one_line(exc, with_kind=True)}): "
            "correct config.json, or fetch the checkpoint again"
        ) from exc
    return model


def meta_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Returns the language model of a config on the meta device, in evaluation mode: a causal one, or one with images.

    Raises:
        CheckpointError: If the config is wrong.
        UnsupportedError: If transformers has no causal language model for it.
    """
    tasks = MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    model_class = class_for_task(config, "causal language model", *tasks)
    name = config.name_or_path or "this config"
    model = build_outline(model_class, config_for(model_class, config), dtype, name)
    model.eval()
    return model
