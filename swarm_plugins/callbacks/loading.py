"""`load_adapter`: loads a published adapter into a model after checking the version of its base."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

from peft import PeftConfig, PeftModel, PeftType
from safetensors import SafetensorError, safe_open
from torch import nn

from swarm_plugins.backbone.version import base_version
from swarm_plugins.callbacks.carrying import check_unchanged
from swarm_plugins.errors import CheckpointError, ConfigError, SwarmError, UnsupportedError, one_line
from swarm_plugins.hub import AdapterFolder, fetch_adapter, open_adapter
from swarm_plugins.hub.adapter_settings import check_settings
from swarm_plugins.hub.folder import WEIGHTS_FILE
from swarm_plugins.model_names import check_adapter_name, expanded
from swarm_plugins.noise import without_peft_deprecation
from swarm_plugins.weights.adapter_patterns import replace_expressions

log = logging.getLogger(__name__)

DRAWING = threading.Lock()
"""Held while PEFT makes an adapter: it draws from the process's one generator, also for tensors that it then loads."""


def load_adapter(
    model: nn.Module,
    repo: str | Path,
    version: str = "latest",
    *,
    on_mismatch: Literal["refuse", "carry", "warn"] = "refuse",
    adapter_name: str = "default",
    is_trainable: bool = False,
    is_shared: bool = False,
    token: str | bool | None = None,
    endpoint: str | None = None,
    cache_dir: str | Path | None = None,
) -> PeftModel:
    """Loads a published adapter into a model and activates it.

    Works for models with remote blocks and for plain ones; nothing is unpickled.

    Args:
        model: A model of transformers, or a PEFT model, to which the adapter is added.
        repo: The adapter's repository on the Hub, or a directory.
        version: A tag, branch or commit; ``latest`` for the newest version.
        on_mismatch: What to do if the adapter was made for another version of the base: ``refuse``; ``carry`` it over
            with a warning if all that it tunes is the same in both versions, and refuse it otherwise; or only ``warn``.
        adapter_name: PEFT's name for it.
        is_trainable: Whether to train it further.
        is_shared: Whether other models use the same base weights. If so, an adapter is refused that changes them when
            it is loaded (PiSSA, OLoRA, LoftQ), names modules by patterns, or has sizes without bound.
        token: Access token of the Hub. None: the stored one.
        endpoint: Address of the Hub; by default ``HF_ENDPOINT``.
        cache_dir: By default the cache of huggingface_hub.

    Raises:
        ConfigError: If a setting is wrong, or the adapter was made for another version of the base.
        HubError: If the Hub does not have it or cannot be reached.
        CheckpointError: If it is not an adapter in safetensors format, or does not fit the model.
        UnsupportedError: If its config names modules by expressions that cannot be matched in bounded time, or it is
            to be trained and its file lacks the encoder of its prompt.
    """
    if on_mismatch not in ("refuse", "carry", "warn"):
        raise ConfigError(f"on_mismatch={on_mismatch!r} must be 'refuse', 'carry' or 'warn'")
    if isinstance(model, PeftModel) and adapter_name in model.peft_config:
        raise ConfigError(
            f"the model has an adapter named {adapter_name!r} already (it has {', '.join(model.peft_config)}); "
            "give another adapter_name="
        )
    adapter = _opened(repo, version, token=token, endpoint=endpoint, cache_dir=cache_dir)
    check_settings(adapter, is_shared=is_shared)
    _check_base(model, adapter, on_mismatch, endpoint=endpoint, token=token, cache_dir=cache_dir)
    return _loaded(model, adapter, adapter_name, is_trainable, is_shared=is_shared)


def _opened(repo: str | Path, version: str, **hub: Any) -> AdapterFolder:
    path = expanded(repo)
    if not isinstance(repo, Path) and not path.is_dir():
        check_adapter_name(repo)
        return fetch_adapter(repo, version, **hub)
    if version != "latest":
        raise ConfigError(
            f"version={version!r} was given for the directory {path}, which has no versions: leave it out"
        )
    return open_adapter(path)


def _check_base(model: nn.Module, adapter: AdapterFolder, on_mismatch: str, **hub: Any) -> None:
    actual, wanted = base_version(model), adapter.base
    if wanted is None or actual is None:
        unknown = "the version of the model's base" if wanted is not None else "the version of the base it was made for"
        log.warning("%s is loaded unchecked: %s is not known", adapter.label, unknown)
        return
    if actual == wanted:
        return
    if on_mismatch == "carry":
        check_unchanged(model, adapter, wanted, **hub)
        warnings.warn(
            f"{adapter.label} was made for {wanted} and is carried over to {actual}: what it tunes is the same there, "
            "other parts are not, so evaluate it before you rely on it",
            UserWarning,
            stacklevel=3,
        )
        return
    why = (
        "one is a commit on the Hub and the other the content of a directory, which cannot be compared"
        if actual.is_local != wanted.is_local
        else "its outputs would be wrong"
    )
    cure = f"load the base with revision={wanted.revision!r}" if not wanted.is_local else "load exactly that base"
    message = f"{adapter.label} was made for {wanted}, the model is {actual}: {why}"
    if on_mismatch == "refuse":
        raise ConfigError(
            f"{message}; {cure}, or pass on_mismatch='carry' to load it if "
            "what it tunes has not changed, or 'warn' to load it anyway"
        )
    warnings.warn(message, UserWarning, stacklevel=3)


def _loaded(
    model: nn.Module, adapter: AdapterFolder, adapter_name: str, is_trainable: bool, *, is_shared: bool
) -> PeftModel:
    folder = str(adapter.folder)
    try:
        config: PeftConfig = PeftConfig.from_pretrained(folder)
        if is_trainable:
            _check_encoder(config, adapter)
        if is_shared:
            _check_copies(model, adapter, getattr(config, "modules_to_save", None) or ())
        if isinstance(model, PeftModel):
            replace_expressions(config, adapter.label, model.get_base_model())
            config.inference_mode = not is_trainable
            with DRAWING:
                loaded = _joined(model, folder, adapter_name, config)
        else:
            replace_expressions(config, adapter.label, model)
            with DRAWING, without_peft_deprecation():
                loaded = PeftModel.from_pretrained(
                    model,
                    folder,
                    adapter_name=adapter_name,
                    is_trainable=is_trainable and not config.is_prompt_learning,  # PEFT refuses that for prompts
                    config=config,
                )
        if config.is_prompt_learning:
            config.inference_mode = not is_trainable
            loaded.prompt_encoder[adapter_name].requires_grad_(is_trainable)  # PEFT leaves it trainable
        return loaded
    except SwarmError:
        raise
    except (RuntimeError, ValueError, KeyError, TypeError, SafetensorError) as exc:
        raise CheckpointError(
            f"{adapter.label} does not fit the model ({one_line(exc, with_kind=True)}); load it into a "
            f"fresh copy of {adapter.base_name or 'the base that it was made for'}"
        ) from exc


def _joined(model: PeftModel, folder: str, name: str, config: PeftConfig) -> PeftModel:
    model.add_adapter(name, config)
    try:
        model.load_adapter(folder, name, is_trainable=not config.inference_mode)
        model.set_adapter(name, inference_mode=config.inference_mode)
    except BaseException:
        # Otherwise the name stays taken, by an adapter of random weights.
        model.delete_adapter(name)
        raise
    return model


def _check_encoder(config: Any, adapter: AdapterFolder) -> None:
    """Refuses to train soft prompts that an encoder has made: PEFT does not save the encoder."""
    if config.peft_type == PeftType.P_TUNING or getattr(config, "prefix_projection", False):
        raise UnsupportedError(
            f"{adapter.label} is of the type {config.peft_type.value} and cannot be trained further: its file has what "
            "its encoder has made, and not the encoder; load it to use it (is_trainable=False)"
        )


def _check_copies(model: nn.Module, adapter: AdapterFolder, saved: Collection[str]) -> None:
    """Refuses modules that PEFT would copy, to train them whole, and that the adapter does not bring along.

    So that it takes no more memory than its file has.
    """
    with safe_open(adapter.folder / WEIGHTS_FILE, "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    # As PEFT finds them.
    copied = ((path, one) for path, one in model.named_modules() if any(map(path.endswith, saved)))
    for path, module in copied:
        for name, one in module.named_parameters():
            if shapes.get(f"base_model.model.{path}.{name}") != list(one.shape):
                raise CheckpointError(
                    f"{adapter.label} cannot share its base with other models: it has {path} as a module to save, but "
                    f"no weights of the same shape for its {name}"
                )
