"""Published adapters that a server holds from the start: PEFT's files, read without PEFT.

LoRA on linear layers and IA3; of an adapter for the whole model only the part on the span is read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from swarm_plugins.adapter_spec import AdapterModule, AdapterSpec, adapter_digest
from swarm_plugins.block_io import LoadedAdapter
from swarm_plugins.blocks.adapter_checks import check_adapter
from swarm_plugins.blocks.span import Span
from swarm_plugins.errors import CheckpointError, ConfigError, UnsupportedError
from swarm_plugins.hub import fetch_adapter, open_adapter
from swarm_plugins.hub.folder import CONFIG_FILE, WEIGHTS_FILE

__all__ = ["preload_adapter"]

_MAX_KEY_CHARS = 512
# The first number in a name is the block's: later ones are of experts.
_NAME = re.compile(r"(?:.+?\.)?\w+\.(?P<block>\d{1,6})\.(?P<module>.+)\.(?P<part>lora_A|lora_B|ia3_l)(?:\.weight)?")
_CHANGED_MATHS = ("use_dora", "fan_in_fan_out", "modules_to_save", "target_parameters", "lora_bias")
"""Settings of LoRA under which its tensors mean something else, or are not all there is."""


def preload_adapter(name: str, span: Span) -> LoadedAdapter:
    """Reads the part of an adapter that lies on a span.

    Args:
        name: Directory, or ``REPO`` or ``REPO@TAG`` on the Hub.
        span: The blocks it is for.

    Raises:
        CheckpointError: If files are missing or damaged.
        HubError: If the Hub does not have it, or cannot be reached.
        CapacityError: If a file is larger than any adapter.
        UnsupportedError: If it is of a kind that servers cannot apply.
        ConfigError: If it does not fit the span, or has nothing on it.
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
            f"adapter {name} has nothing on blocks {span.start}:{span.end}: leave it out, or serve the blocks it is for"
        )
    modules: list[AdapterModule] = []
    tensors: list[Tensor] = []
    for place in _in_model_order(parts, span):
        try:
            module, factors = _module(name, config, place, parts[place])
        except (TypeError, ValueError, IndexError, AttributeError, OverflowError, re.error) as error:
            raise CheckpointError(
                f"adapter {name} has settings or tensors that make no sense for block {place.block}, {place.module}: "
                f"{error}"
            ) from error
        modules.append(module)
        tensors.extend(factors)
    spec = AdapterSpec(modules=tuple(modules))
    return check_adapter(spec, tensors, span, digest=adapter_digest(spec, tensors))


@dataclass(frozen=True)
class _Place:
    """Where a layer of the adapter sits."""

    block: int
    module: str


def _folder(name: str) -> Path:
    directory = Path(name).expanduser()
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
        raise UnsupportedError(f"adapter {name} is of kind {kind!r}: servers can hold LORA and IA3")
    changed = [setting for setting in _CHANGED_MATHS if config.get(setting)]
    if config.get("bias", "none") != "none":
        changed.append("bias")
    if changed:
        raise UnsupportedError(
            f"adapter {name} uses {', '.join(changed)}: servers can hold plain LoRA and IA3 on linear layers; "
            "clients can still send what their own model supports"
        )
    return dict(config)


def _on_span(keys: Sequence[str], blocks: range) -> dict[_Place, dict[str, str]]:
    """Returns for each adapted module in the span the keys of its tensors, by part."""
    found: dict[_Place, dict[str, str]] = {}
    for key in keys:
        match = _NAME.fullmatch(key) if len(key) <= _MAX_KEY_CHARS else None
        if match is not None and int(match["block"]) in blocks:
            found.setdefault(_Place(int(match["block"]), match["module"]), {})[match["part"]] = key
    return found


def _in_model_order(parts: Mapping[_Place, object], span: Span) -> Iterator[_Place]:
    """Yields the places as a client's model lists them, so that both compute the same digest."""
    left = dict.fromkeys(parts)
    for block in span.blocks:
        for path, _ in span.module(block, "").named_modules():
            place = _Place(block, path)
            if place in left:
                del left[place]
                yield place
    # What the span does not have is left for the check to refuse, by name.
    yield from left


def _module(
    name: str, config: Mapping[str, Any], place: _Place, parts: Mapping[str, Tensor]
) -> tuple[AdapterModule, tuple[Tensor, ...]]:
    where = f"block {place.block}, {place.module}"
    if config["peft_type"] == "IA3":
        vector = parts.get("ia3_l")
        if vector is None:
            raise CheckpointError(f"adapter {name} has no ia3_l for {where}")
        is_feedforward = _matches(place.module, config.get("feedforward_modules") or ())
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


def _matches(module: str, names: Sequence[str] | str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == one or module.endswith(f".{one}") for one in names)


def _pattern(pattern: Mapping[str, float] | None, place: _Place, default: float) -> float:
    """Returns the value that PEFT takes for a module: of the first pattern that its name ends with."""
    path = f"layers.{place.block}.{place.module}"
    for expression, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({expression})$", path):
            return value
    return default
