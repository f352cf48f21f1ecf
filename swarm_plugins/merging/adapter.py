"""An adapter on a model without weights: PEFT's own layers merge one module at a time, when its weights are read.

So every method, option and rounding is PEFT's, and no more than one module of the base is in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from peft import PEFT_TYPE_TO_TUNER_MAPPING, PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from swarm_plugins.checkpoint.hollow import hollow_tensor, is_hollow
from swarm_plugins.errors import CheckpointError, SwarmError, UnsupportedError, one_line
from swarm_plugins.hub import AdapterFolder
from swarm_plugins.hub.adapter_settings import HARMLESS_STARTS, changes_of_base, check_settings
from swarm_plugins.hub.folder import WEIGHTS_FILE
from swarm_plugins.noise import without_tied_remark
from swarm_plugins.weights.adapter_patterns import replace_expressions

ADAPTER_NAME = "default"
"""PEFT's name for the adapter."""
_LAYERS: Any = (BaseTunerLayer, AuxiliaryTrainingWrapper)
_READ_WEIGHTS = ("ADAMSS", "FROD", "OSF", "PSOFT", "SUPERTUNING")
"""Methods that decompose or rank the base's weights when their layers are made; an outline has no weights."""


class MergingAdapter:
    """Merges an adapter into the weights of modules, one by one.

    Args:
        adapter: Its folder.
        outline: The base, without storage; it gets the adapter's layers.

    Raises:
        CheckpointError: If the adapter does not fit the base.
        UnsupportedError: If it cannot become part of the weights.
    """

    config: PeftConfig
    """PEFT's, for an outline of this version of transformers."""
    modules: dict[str, nn.Module]
    """What the adapter changes, by path: PEFT's layers around the base's modules, and modules that it brings along."""

    def __init__(self, adapter: AdapterFolder, outline: PreTrainedModel) -> None:
        self.label = adapter.label
        config = mergeable_config(adapter, outline)
        _make_hollow(outline, keep_room=_given_names(adapter))
        try:
            with without_tied_remark():
                model = PeftModel(outline, config, ADAPTER_NAME)
                # Looks for an accelerator otherwise.
                result = model.load_adapter(str(adapter.folder), ADAPTER_NAME, torch_device="cpu")
                tuner: Any = model.base_model
                tuner._check_merge_allowed()
        except SwarmError:
            raise
        except (RuntimeError, ValueError, KeyError, TypeError, NotImplementedError, SafetensorError) as exc:
            raise CheckpointError(
                f"{adapter.label} does not fit the base ({one_line(exc, with_kind=True)}): give the base that it was "
                f"trained on{f', {adapter.base_name}' if adapter.base_name else ''}"
            ) from exc
        if missing := _missing(model, result.missing_keys):
            raise CheckpointError(
                f"{adapter.label} lacks {len(missing)} tensors that its config asks for, such as {missing[0]}: fetch "
                "it again"
            )
        if result.unexpected_keys:
            raise CheckpointError(
                f"{adapter.label} has {len(result.unexpected_keys)} tensors that have no place in the base, such as "
                f"{result.unexpected_keys[0]}: give the base that it was trained on"
            )
        self.config = config
        self.modules = _outermost(tuner.model)
        for path, module in tuner.model.named_modules():
            # PEFT saves embeddings whole if an adapter is on them, or tokens were added.
            is_given = any(one is not None and not is_hollow(one) for one in module._parameters.values())
            if is_given and not _is_under(path, self.modules):
                self.modules[path] = module

    def parameters(self, path: str) -> list[str]:
        """Returns the names of a module's parameters, as they are in the base's."""
        return [name for name, _ in _wrapped(self.modules[path]).named_parameters()]

    def merge(self, path: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the parameters of a module with the adapter merged.

        Args:
            path: The module's.
            weights: All of the base's parameters of the module, by name; they may be changed in place.

        Raises:
            UnsupportedError: If PEFT cannot merge it.
            CheckpointError: If the result holds NaN or infinity.
        """
        layer: Any = self.modules[path]
        hollow = _put(_wrapped(layer), weights)
        try:
            merged = {name: one.detach() for name, one in _whole(layer).named_parameters()}
        except (RuntimeError, ValueError, NotImplementedError, AttributeError) as exc:
            raise UnsupportedError(f"{self.label} cannot be merged into {path}: {one_line(exc)}") from exc
        finally:
            _put(_wrapped(layer), hollow)
            for part in layer.modules():
                if isinstance(part, BaseTunerLayer):
                    part.merged_adapters.clear()
        for name, one in merged.items():
            if not bool(torch.isfinite(one).all()):
                raise CheckpointError(
                    f"{path}.{name} holds NaN or infinity once {self.label} is merged: the adapter is broken, or its "
                    "numbers are too large for the type of the base; try another --dtype"
                )
        return merged


def mergeable_config(adapter: AdapterFolder, outline: nn.Module) -> PeftConfig:
    """Returns an adapter's config, with names instead of expressions, if PEFT can make it part of the base's weights.

    Raises:
        CheckpointError: If the config cannot be read, or would run code.
        UnsupportedError: If it cannot be merged, or its expressions cannot be matched in bounded time.
    """
    check_settings(adapter, is_shared=False)
    try:
        config: PeftConfig = PeftConfig.from_pretrained(str(adapter.folder))
        replace_expressions(config, adapter.label, outline)
    except (ValueError, KeyError, TypeError) as exc:
        raise CheckpointError(f"the config of {adapter.label} cannot be read ({one_line(exc)})") from exc
    tuners: Mapping[Any, Any] = PEFT_TYPE_TO_TUNER_MAPPING
    tuner = tuners.get(config.peft_type)
    kind = getattr(config.peft_type, "value", config.peft_type)
    if config.is_prompt_learning or not hasattr(tuner, "merge_and_unload"):
        raise UnsupportedError(
            f"{adapter.label} is of the type {kind}, which adds to the input or the model and cannot become part of "
            "the base's weights; LORA, IA3 and other methods that change weights can"
        )
    if found := changes_of_base(vars(config)):
        raise UnsupportedError(
            f"{adapter.label} sets {found}, which cannot be merged tensor by tensor: use PEFT's merge"
        )
    if kind in _READ_WEIGHTS and not getattr(config, "save_precomputed_indices", False):
        raise UnsupportedError(
            f"{adapter.label} is of the type {kind}, which reads the base's weights and cannot be merged tensor by "
            "tensor: use PEFT's merge"
        )
    start = getattr(config, "init_lora_weights", None)
    if start not in HARMLESS_STARTS:
        raise UnsupportedError(
            f"{adapter.label} sets init_lora_weights={str(start)[:40]!r}, which changes the base: save it as a plain "
            "LoRA, with path_initial_model_for_weight_conversion of PEFT's save_pretrained"
        )
    config.inference_mode = True
    return config


def _missing(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Returns the names whose tensor was not loaded under another name: VB-LoRA's layers share one bank."""
    tensors = model.state_dict(keep_vars=True)
    loaded = {id(one) for name, one in tensors.items() if name not in names}
    return [name for name in names if name not in tensors or id(tensors[name]) not in loaded]


def _given_names(adapter: AdapterFolder) -> set[str]:
    """Returns the names of what an adapter brings along, those of the base's parameters among them."""
    try:
        with safe_open(adapter.folder / WEIGHTS_FILE, "pt") as file:
            return {name.removeprefix("base_model.model.").replace(".base_layer.", ".") for name in file.keys()}  # noqa: SIM118
    except SafetensorError as exc:
        raise CheckpointError(f"the weights of {adapter.label} are corrupt ({one_line(exc)}): fetch it again") from exc


def _make_hollow(model: nn.Module, *, keep_room: Collection[str]) -> None:
    """Replaces parameters by ones of the CPU, to whose device PEFT moves its own, over one element of storage.

    Those to ``keep_room`` for get all of it.
    """
    for path, module in model.named_modules():
        for name, one in module._parameters.items():
            if one is not None:
                has_room = (f"{path}.{name}" if path else name) in keep_room
                new = torch.zeros_like(one, device="cpu") if has_room else hollow_tensor(one.shape, one.dtype, "cpu")
                module._parameters[name] = nn.Parameter(new, requires_grad=False)


def _outermost(model: nn.Module) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if isinstance(module, _LAYERS) and not _is_under(path, found):
            found[path] = module
    return found


def _is_under(path: str, others: Collection[str]) -> bool:
    """Returns whether a module is one of others, or inside one."""
    parents = path.split(".")
    return any(".".join(parents[:depth]) in others for depth in range(1, len(parents) + 1))


def _whole(layer: Any) -> nn.Module:
    """Returns a module of the base after merging what is around it, as PEFT's ``merge_and_unload`` does."""
    if hasattr(layer, "unload_and_optionally_merge_module"):
        found: nn.Module = layer.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
        return found
    if isinstance(layer, BaseTunerLayer):
        tuner: Any = layer
        tuner.merge(safe_merge=False)
    return _wrapped(layer)


def _wrapped(layer: Any) -> nn.Module:
    """Returns the base's own module."""
    while isinstance(layer, _LAYERS):
        layer = layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else layer.original_module
    found: nn.Module = layer
    return found


def _put(module: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Puts parameters into a module, but where the adapter has brought its own; returns those that were there."""
    before = {}
    for name, one in weights.items():
        owner_path, _, own = name.rpartition(".")
        parameters: Any = module.get_submodule(owner_path)._parameters
        if not is_hollow(parameters[own]) and not isinstance(one, nn.Parameter):
            continue
        before[name] = parameters[own]
        parameters[own] = one if isinstance(one, nn.Parameter) else nn.Parameter(one, requires_grad=False)
    return before
