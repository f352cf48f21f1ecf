"""`load_adapter`: loads a published adapter into a model after checking the version of its base."""

from __future__ import annotations

import json
import logging
import re
import warnings
from pathlib import Path
from typing import Any, Literal

from peft import PeftModel
from safetensors import SafetensorError
from torch import nn

from swarm_plugins.backbone.version import base_version
from swarm_plugins.errors import CheckpointError, ConfigError, SwarmError, one_line
from swarm_plugins.hub import AdapterFolder, fetch_adapter, open_adapter
from swarm_plugins.hub.folder import CONFIG_FILE
from swarm_plugins.model_names import check_adapter_name
from swarm_plugins.noise import without_peft_deprecation

log = logging.getLogger(__name__)

# Settings that make PEFT import a module by its name, or unpickle a file.
_REFUSED_SETTINGS = ("megatron_config", "corda_config", "lora_ga_config", "prompt_tuning_init_state_dict_path")

# Of adapters whose base others use, too.
_HARMLESS_TYPES = ("LORA", "IA3", "LOHA", "LOKR", "PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING")
_HARMLESS_STARTS = (None, True, False, "gaussian", "orthogonal")
"""Of LoRA's matrices; the others (PiSSA, OLoRA, LoftQ, ...) change the base's weights, also when weights are loaded."""
_NAMES = ("target_modules", "exclude_modules", "layers_pattern", "rank_pattern", "alpha_pattern")
"""What PEFT takes for regular expressions, some of which take hours, if it is not a list of names."""
_PLAIN_NAME = re.compile(r"[\w.-]{1,200}", re.ASCII)
_MAX_RANK = 4096


def load_adapter(
    model: nn.Module,
    repo: str | Path,
    version: str = "latest",
    *,
    on_mismatch: Literal["refuse", "warn"] = "refuse",
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
        on_mismatch: Whether to ``refuse`` or ``warn`` if the adapter was made for another version of the base.
        adapter_name: PEFT's name for it.
        is_trainable: Whether to train it further.
        is_shared: Whether others use the base's weights, too: adapters that change them when they are loaded (PiSSA,
            OLoRA, LoftQ) are refused then, and so are those that name modules by patterns.
        token: Access token of the Hub. None: the stored one.
        endpoint: Address of the Hub; by default ``HF_ENDPOINT``.
        cache_dir: By default the cache of huggingface_hub.

    Raises:
        ConfigError: If a setting is wrong, or the adapter was made for another version of the base.
        HubError: If the Hub does not have it or cannot be reached.
        CheckpointError: If it is not an adapter in safetensors format, or does not fit the model.
    """
    if on_mismatch not in ("refuse", "warn"):
        raise ConfigError(f"on_mismatch={on_mismatch!r} must be 'refuse' or 'warn'")
    if isinstance(model, PeftModel) and adapter_name in model.peft_config:
        raise ConfigError(
            f"the model has an adapter named {adapter_name!r} already (it has {', '.join(model.peft_config)}); "
            "give another adapter_name="
        )
    adapter = _opened(repo, version, token=token, endpoint=endpoint, cache_dir=cache_dir)
    _check_config(adapter, is_shared=is_shared)
    _check_base(model, adapter, on_mismatch)
    return _loaded(model, adapter, adapter_name, is_trainable)


def _opened(repo: str | Path, version: str, **hub: Any) -> AdapterFolder:
    path = Path(repo).expanduser()
    if not isinstance(repo, Path) and not path.is_dir():
        check_adapter_name(repo)
        return fetch_adapter(repo, version, **hub)
    if version != "latest":
        raise ConfigError(
            f"version={version!r} was given for the directory {path}, which has no versions: leave it out"
        )
    return open_adapter(path)


def _check_config(adapter: AdapterFolder, *, is_shared: bool) -> None:
    try:
        config = json.loads((adapter.folder / CONFIG_FILE).read_bytes())
    except ValueError as exc:
        raise CheckpointError(f"{CONFIG_FILE} of {adapter.label} is not JSON ({one_line(exc)})") from exc
    found = [name for name in _REFUSED_SETTINGS if config.get(name)]
    if found:
        raise CheckpointError(
            f"{CONFIG_FILE} of {adapter.label} sets {', '.join(found)}, which would load code or pickled files; "
            "ask its author to save it without"
        )
    if is_shared and (fault := _fault_for_others(config)):
        raise CheckpointError(
            f"{adapter.label} cannot be used where others use the same base: its {CONFIG_FILE} {fault}"
        )


def _fault_for_others(config: dict[str, Any]) -> str | None:
    """Returns what an adapter might do to others who use its base; None if it does nothing to them."""
    kind, start = config.get("peft_type"), config.get("init_lora_weights")
    if kind not in _HARMLESS_TYPES:
        return f"has the type {str(kind)[:40]!r}; known: {', '.join(_HARMLESS_TYPES)}"
    if start not in _HARMLESS_STARTS:
        return f"sets init_lora_weights={str(start)[:40]!r}, which changes the base: convert it to plain LoRA"
    for name in _NAMES:
        value = config.get(name) or ()
        patterns = [value] if isinstance(value, str) else list(value)
        if any(not isinstance(one, str) or _PLAIN_NAME.fullmatch(one) is None for one in patterns):
            return f"has a pattern as {name}: name the modules instead"
    ranks = [config.get("r") or 1, *(config.get("rank_pattern") or {}).values()]
    if any(type(rank) is not int or rank > _MAX_RANK for rank in ranks):
        return f"has a rank above {_MAX_RANK}"
    return None


def _check_base(model: nn.Module, adapter: AdapterFolder, on_mismatch: str) -> None:
    actual, wanted = base_version(model), adapter.base
    if wanted is None or actual is None:
        unknown = "the version of the model's base" if wanted is not None else "the version of the base it was made for"
        log.warning("%s is loaded unchecked: %s is not known", adapter.label, unknown)
        return
    if actual == wanted:
        return
    why = (
        "one is a commit on the Hub and the other the content of a directory, which cannot be compared"
        if actual.is_local != wanted.is_local
        else "its outputs would be wrong"
    )
    cure = f"load the base with revision={wanted.revision!r}" if not wanted.is_local else "load exactly that base"
    message = f"{adapter.label} was made for {wanted}, the model is {actual}: {why}"
    if on_mismatch == "refuse":
        raise ConfigError(f"{message}; {cure}, or pass on_mismatch='warn' to load it anyway")
    warnings.warn(message, UserWarning, stacklevel=3)


def _loaded(model: nn.Module, adapter: AdapterFolder, adapter_name: str, is_trainable: bool) -> PeftModel:
    folder = str(adapter.folder)
    try:
        if isinstance(model, PeftModel):
            model.load_adapter(folder, adapter_name, is_trainable=is_trainable)
            model.set_adapter(adapter_name)
            return model
        with without_peft_deprecation():
            return PeftModel.from_pretrained(model, folder, adapter_name=adapter_name, is_trainable=is_trainable)
    except SwarmError:
        raise
    except (RuntimeError, ValueError, KeyError, TypeError, SafetensorError) as exc:
        raise CheckpointError(
            f"{adapter.label} does not fit the model ({one_line(exc, with_kind=True)}); load it into a "
            f"fresh copy of {adapter.base_name or 'the base that it was made for'}"
        ) from exc
