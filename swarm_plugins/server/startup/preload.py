"""Reads published adapters that a server holds from the start: PEFT's files, without PEFT.

Supports LoRA on linear layers and IA3; reads only the part on the span.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from swarm_plugins.adapter_spec import AdapterModule, AdapterSpec
from swarm_plugins.block_io import LoadedAdapter
from swarm_plugins.blocks.adapters.checks import check_adapter
from swarm_plugins.blocks.span import Span
from swarm_plugins.errors import CheckpointError, ConfigError, UnsupportedError
from swarm_plugins.hub import fetch_adapter, open_adapter
from swarm_plugins.hub.folder import CONFIG_FILE, WEIGHTS_FILE
from swarm_plugins.model_names import expanded
from swarm_plugins.transport.codec import has_non_finite
from swarm_plugins.weights.published.targets import Target

_MAX_KEY_CHARS = 512
_MAX_PATTERNS = 1 << 11
_target = functools.lru_cache(2 * _MAX_PATTERNS)(Target)  # what a hostile expression cannot keep busy
_PREFIX = "base_model.model."
"""What PEFT puts before the names of a model's modules."""
# The first number in a name is the block's; later ones are experts'.
_NAME = re.compile(r"(?:.+?\.)?\w+\.(?P<block>\d{1,6})\.(?P<module>.+)\.(?P<part>lora_A|lora_B|ia3_l)(?:\.weight)?")
_CHANGED_MATHS = ("use_dora", "fan_in_fan_out", "modules_to_save", "target_parameters", "lora_bias")
"""Settings of LoRA that change the meaning of its tensors, or add others."""


def preload_adapter(name: str, span: Span) -> LoadedAdapter:
    """Reads the part of an adapter that lies on a span.

    ``name`` is a directory, or ``REPO`` or ``REPO@TAG`` on the Hub.

    Raises:
        CheckpointError: If files are missing or damaged.
        HubError: If the Hub does not have it, or cannot be reached.
        CapacityError: If a file is too large for an adapter.
        UnsupportedError: If servers cannot apply this kind of adapter.
        ConfigError: If it does not fit the span, or adapts nothing on it.
    """
    folder = _folder(name)
    config = _config(name, folder / CONFIG_FILE)
    weights_path = folder / WEIGHTS_FILE
    try:
        with safe_open(str(weights_path), framework="pt") as weights:
            found = _on_span(weights.keys(), span.blocks)
            parts = {
                place: {part: weights.get_tensor(key) for part, key in keys.items()} for place, keys in found.items()
            }
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot read the adapter weights {weights_path}: {error}") from error
    if not parts:
        raise ConfigError(
            f"adapter {name} adapts nothing on blocks {span.blocks.start}:{span.blocks.stop}: leave it out, or serve "
            "blocks it adapts"
        )
    modules: list[AdapterModule] = []
    tensors: list[Tensor] = []
    for place in _in_model_order(parts, span):
        try:
            module, factors = _module(name, config, place, parts[place])
        except (TypeError, ValueError, IndexError, AttributeError, OverflowError, UnsupportedError) as error:
            raise CheckpointError(
                f"adapter {name} has invalid settings or tensors for block {place.block}, {place.module}: {error}"
            ) from error
        if any(has_non_finite(factor) for factor in factors):
            raise CheckpointError(f"adapter {name} holds NaN or infinity in block {place.block}, {place.module}")
        modules.append(module)
        tensors.extend(factors)
    return check_adapter(AdapterSpec(modules=tuple(modules)), tensors, span)


@dataclass(frozen=True)
class _Place:
    """An adapted module."""

    block: int
    module: str
    name: str = field(compare=False, default="")
    """The module's name in the whole model, by which PEFT looks for its settings."""


def _folder(name: str) -> Path:
    directory = expanded(name)
    if directory.is_dir():
        return open_adapter(directory, label=f"adapter {name}").folder
    repo, _, tag = name.partition("@")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise ConfigError(f"adapter {name!r} is neither a directory nor REPO or REPO@TAG on the Hub")
    return fetch_adapter(repo, tag or "main").folder


def _config(name: str, path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind not in ("LORA", "IA3"):
        raise UnsupportedError(f"adapter {name} is of kind {kind!r}: servers support LORA and IA3")
    changed = [setting for setting in _CHANGED_MATHS if config.get(setting)]
    if config.get("bias", "none") != "none":
        changed.append("bias")
    if changed:
        raise UnsupportedError(
            f"adapter {name} uses {', '.join(changed)}: servers support plain LoRA and IA3 on linear layers; "
            "clients can still send what their own model supports"
        )
    return dict(config)


def _on_span(keys: Sequence[str], blocks: range) -> dict[_Place, dict[str, str]]:
    """Returns the keys of the tensors of each adapted module in the span, by part."""
    found: dict[_Place, dict[str, str]] = {}
    for key in keys:
        match = _NAME.fullmatch(key) if len(key) <= _MAX_KEY_CHARS else None
        if match is not None and int(match["block"]) in blocks:
            name = key[: match.start("part") - 1].removeprefix(_PREFIX)
            found.setdefault(_Place(int(match["block"]), match["module"], name), {})[match["part"]] = key
    return found


def _in_model_order(parts: Mapping[_Place, object], span: Span) -> Iterator[_Place]:
    """Yields the places in the order of a client's model, so that both compute the same digest."""
    left = {place: place for place in parts}
    for block in span.blocks:
        for path, _ in span.module(block, "").named_modules():
            if (place := left.pop(_Place(block, path), None)) is not None:
                yield place
    # check_adapter refuses by name what the span lacks.
    yield from left


def _module(
    name: str, config: Mapping[str, Any], place: _Place, parts: Mapping[str, Tensor]
) -> tuple[AdapterModule, tuple[Tensor, ...]]:
    where = f"block {place.block}, {place.module}"
    if config["peft_type"] == "IA3":
        vector = parts.get("ia3_l")
        if vector is None:
            raise CheckpointError(f"adapter {name} has no ia3_l for {where}")
        is_feedforward = _matches(place.name, config.get("feedforward_modules") or ())
        module = AdapterModule(
            block=place.block,
            module=place.module,
            kind="ia3",
            shapes=(tuple(vector.shape),),
            is_feedforward=is_feedforward,
        )
        return module, (vector,)
    if "lora_A" not in parts or "lora_B" not in parts:
        raise CheckpointError(f"adapter {name} has only one of lora_A and lora_B for {where}")
    factors = (parts["lora_A"], parts["lora_B"])
    rank = max(1, factors[0].shape[0])
    alpha = float(_pattern(config.get("alpha_pattern"), place, config.get("lora_alpha", 8)))
    module = AdapterModule(
        block=place.block,
        module=place.module,
        kind="lora",
        shapes=(tuple(factors[0].shape), tuple(factors[1].shape)),
        scaling=alpha / (math.sqrt(rank) if config.get("use_rslora") else rank),
    )
    return module, factors


def _matches(name: str, names: Sequence[str] | str) -> bool:
    if isinstance(names, str):
        return _target(f"({names})$").matches(name)
    return any(name == one or name.endswith(f".{one}") for one in names)


def _pattern(pattern: Mapping[str, float] | None, place: _Place, default: float) -> float:
    """Returns a module's value as PEFT does: by the first pattern that its name ends with."""
    if pattern and len(pattern) > _MAX_PATTERNS:
        raise ValueError(f"alpha_pattern has {len(pattern)} entries, at most {_MAX_PATTERNS} are read")
    for expression, value in (pattern or {}).items():
        if _target(rf"(.*\.)?({expression})$").matches(place.name):
            return value
    return default
