"""Loads partial models: HF's own class, cut down as it is constructed, filled by transformers' own loading.

So every conversion that transformers does (renamed tensors, one tensor per expert to fused ones) happens here too, and
HF's own forward runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from swarm_plugins.adapter_saves import sign_adapters
from swarm_plugins.checkpoint.source import Checkpoint
from swarm_plugins.errors import CheckpointError, SwarmError, UnsupportedError
from swarm_plugins.noise import quiet_transformers, without_bars
from swarm_plugins.versions import ModelVersion

CONSTRUCTION = threading.RLock()
"""Held while transformers makes a model: it changes torch's default type for the whole process meanwhile. Two threads
at once would leave the type of one of them behind."""

_NEW_WEIGHTS = 1 << 24
"""Most that a model may have beside twice its tensors."""


def model_from_tensors(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    tensors: dict[str, Tensor] | None,
    dtype: torch.dtype | str,
    name: str,
    *,
    trim: Callable[[PreTrainedModel], object] = lambda _: None,
    may_lack: Callable[[str], bool] | None = None,
    device: torch.device | None = None,
) -> PreTrainedModel:
    """Loads what `trim` leaves of a model.

    Args:
        model_class: HF's class.
        config: Its config.
        tensors: The weights, under the checkpoint's names. None: transformers reads, or downloads, the checkpoint
            itself, and of tensors that `trim` has distributed only this rank's part.
        dtype: Floating type of the weights; ``auto``: the config's.
        name: The checkpoint's directory or repository, which becomes the model's name.
        trim: Changes the model as soon as it is constructed, before weights have memory: removes (`leave_out`), empties
            (`empty_modules`) or replaces modules.
        may_lack: Which weights transformers initialises, and reports, if they are not in `tensors`, such as a new head.
            None: none.
        device: Where the weights go; None: to the CPU.

    Returns:
        An instance of ``model_class``, in evaluation mode.

    Raises:
        CheckpointError: If a tensor is missing or has a wrong shape, or the model is far larger than its tensors.
    """
    source: dict[str, Any] = {"state_dict": tensors}

    def trimmed(model: PreTrainedModel) -> None:
        trim(model)
        if tensors is not None:
            _check_size(model, tensors, name)

    if tensors is None:
        source = {"device_map": device, "revision": getattr(config, "_commit_hash", None) or "main"}
    try:
        # Its report says what errors here say, unless weights may be missing.
        with CONSTRUCTION, torch.device("cpu"), without_bars() if may_lack else quiet_transformers():
            loaded: Any = _trimmed_class(model_class, trimmed).from_pretrained(
                None if tensors is not None else name,
                config=config,
                **source,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except SwarmError:
        raise  # from `trim`; perhaps a RuntimeError too
    except (RuntimeError, OSError) as exc:
        raise CheckpointError(f"{name} has tensors that do not fit its config: {exc}") from exc
    model: PreTrainedModel = loaded[0]
    info: dict[str, Any] = loaded[1]
    wrong = sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in info["mismatched_keys"])
    if wrong:
        raise CheckpointError(f"{name} has {len(wrong)} tensors of a wrong shape, such as {wrong[0]}: not its config")
    missing = sorted(weight for weight in info["missing_keys"] if may_lack is None or not may_lack(weight))
    if missing:
        raise CheckpointError(f"{name} lacks {len(missing)} tensors, such as {missing[0]}: fetch it again")
    # From here on it is HF's own class: PEFT's and transformers' tables go by class and model_type.
    model.__class__ = model_class
    # As from_pretrained sets them when it is given a name: model cards and PEFT's adapters read the config.
    model.name_or_path = model.config.name_or_path = name
    model.train(False)
    return model


def _check_size(model: PreTrainedModel, tensors: Mapping[str, Tensor], name: str) -> None:
    """Refuses a model far larger than its tensors: transformers gives memory to all weights before it compares them."""
    # On the meta device, a hollow one with one element. Tied ones may count twice, and a new head is small.
    needed = sum(weight.untyped_storage().nbytes() // weight.element_size() for weight in model.parameters())
    given = sum(tensor.numel() for tensor in tensors.values())
    if needed > 2 * given + _NEW_WEIGHTS:
        raise CheckpointError(
            f"{name} has {given} weights for a part of the model that has {needed} by its config: they are of "
            "different checkpoints, fetch both again"
        )


def _trimmed_class(
    model_class: type[PreTrainedModel], trim: Callable[[PreTrainedModel], object]
) -> type[PreTrainedModel]:
    """Makes a subclass that trims what it constructs, for the time of loading."""

    def init(self: Any, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, config, *args, **kwargs)
        trim(self)

    # transformers looks up weight conversions by class name and capabilities by the module's source.
    attributes = {"__init__": init, "__module__": model_class.__module__, "__qualname__": model_class.__qualname__}
    return type(model_class.__name__, (model_class,), attributes)


def mark_base(model: PreTrainedModel, version: ModelVersion) -> None:
    """Notes in a model's decoder, whose weights are not trained, which version of a base it is."""
    sign_adapters(model, version)
    model.base_model._swarm_base = version  # type: ignore[assignment]  # no tensor, no module


def marked_base(module: nn.Module) -> ModelVersion | None:
    """Returns what `mark_base` noted in this very module; None for others."""
    version = vars(module).get("_swarm_base")
    return version if isinstance(version, ModelVersion) else None


def take_generation_config(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Gives a model the checkpoint's defaults for generation, if both know any.

    Raises:
        CheckpointError: If their file is corrupt or cannot be fetched.
    """
    if model.can_generate() and (generation := checkpoint.generation_config()) is not None:
        model.generation_config = generation


def empty_modules(modules: Iterable[nn.Module]) -> None:
    """Takes the parameters out of modules, which stay in the model without weights."""
    for module in modules:
        module._parameters.clear()
        # Or transformers would initialise what it thinks is missing.
        module._is_hf_initialized = True  # type: ignore[assignment]


def leave_out(model: nn.Module, paths: Iterable[str]) -> None:
    """Replaces modules by `nn.Identity`."""
    for path in paths:
        model.set_submodule(path, nn.Identity())


def config_for(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the part of a config that a class takes: a text model's, of a multimodal one."""
    return config if type(config) is model_class.config_class else config.get_text_config(decoder=True)


def leave_unscaled(config: PreTrainedConfig) -> None:
    """Switches off that a model halves weights and hidden states every so many layers (RWKV).

    Layers apart from each other would not agree on it. It computes the same without; float16 may overflow.
    """
    if getattr(config, "rescale_every", 0):
        config.rescale_every = 0


def class_for_task(config: PreTrainedConfig, what: str, *tasks: Mapping[Any, Any]) -> type[PreTrainedModel]:
    """Returns the class that transformers' mappings of tasks have for a config: the one it names, or else the first.

    Raises:
        UnsupportedError: If there is none; the message says ``what`` was looked for.
    """
    known = [task[type(config)] for task in tasks if type(config) in task]
    found: list[type[PreTrainedModel]] = [
        one for some in known for one in (some if isinstance(some, (tuple, list)) else (some,))
    ]
    if not found:
        raise UnsupportedError(
            f"{config.name_or_path or 'this config'}: transformers has no {what} for model_type "
            f"{config.model_type!r}: use a decoder-only model that AutoModel can load for this task"
        )
    return next((one for one in found if one.__name__ in (config.architectures or ())), found[0])
