"""What a training call computes: texts with their targets, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_plugins.errors import ConfigError, printable
from swarm_plugins.tuning.losses import TARGETS, find_loss, settings_of


@dataclass(frozen=True)
class Datum:
    """One text.

    Letters: N tokens, K targets a position.
    """

    tokens: Tensor
    """``[N]``, int64."""
    inputs: Mapping[str, Tensor]
    """What the loss takes, ``[N]`` or ``[N, K]`` each; ``target_tokens`` (int64) stand where they are predicted."""


@dataclass(frozen=True)
class LossCall:
    """Which loss, with which settings."""

    name: str
    settings: Mapping[str, float]

    @classmethod
    def of(cls, name: str, settings: Mapping[str, float | str]) -> LossCall:
        """Returns a call with the loss's defaults filled in.

        Raises:
            ConfigError: If there is no such loss or setting.
        """
        return cls(name, settings_of(name, settings))


@dataclass(frozen=True)
class TextBounds:
    """Bounds of a model on the texts that it trains on."""

    context: int
    """Most tokens of a text."""
    vocabulary: int
    """Token ids are below this."""
    max_targets: int = 64
    """Most targets a position."""
    max_texts: int = 256
    """Most texts of a call: clients cut longer ones."""


def check_datums(datums: Sequence[Datum], call: LossCall, bounds: TextBounds) -> None:
    """Raises unless a loss can be computed on texts.

    Raises:
        ConfigError: Saying which text has what wrong.
    """
    if len(datums) > bounds.max_texts:
        raise ConfigError(f"{len(datums)} texts in one call, at most {bounds.max_texts} are possible: cut it")
    for number, datum in enumerate(datums):
        try:
            _check(datum, call, bounds)
        except ConfigError as exc:
            raise ConfigError(f"datum {number} of {len(datums)}: {exc}") from None


def _check(datum: Datum, call: LossCall, bounds: TextBounds) -> None:
    length = len(datum.tokens)
    if not 1 <= length <= bounds.context:
        raise ConfigError(f"{length} tokens, but 1 to {bounds.context} can be computed here")
    _check_inputs(datum.inputs, call.name)
    targets = datum.inputs[TARGETS]
    is_sound = targets.ndim in (1, 2) and len(targets) == length
    if not is_sound or not 1 <= targets.shape[1:].numel() <= bounds.max_targets:
        raise ConfigError(
            f"{TARGETS} has shape {tuple(targets.shape)}, but the text has {length} tokens: give [{length}], or "
            f"[{length}, K] with K from 1 to {bounds.max_targets}"
        )
    for name, ids in (("tokens", datum.tokens), (TARGETS, targets)):
        if ids.dtype != torch.int64:
            raise ConfigError(f"{name} must be whole numbers (int64), not {printable(str(ids.dtype))}")
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < bounds.vocabulary:
            raise ConfigError(f"{name} has ids outside of the vocabulary, 0 to {bounds.vocabulary - 1}")
    check = find_loss(call.name).check
    if check is not None:
        check(datum.inputs)


def _check_inputs(inputs: Mapping[str, Tensor], name: str) -> None:
    loss = find_loss(name)
    required = (TARGETS, *loss.inputs)
    missing = [one for one in required if one not in inputs]
    if missing:
        raise ConfigError(f"{name} needs loss_fn_inputs {', '.join(required)}; missing: {', '.join(missing)}")
    wanted = tuple(inputs[TARGETS].shape)
    for one in (*loss.inputs, *(other for other in loss.optional if other in inputs)):
        shape = tuple(inputs[one].shape)
        expected = wanted[:1] if one in loss.by_position else wanted
        if shape != expected:
            raise ConfigError(f"{one} has shape {shape}, but {TARGETS} {wanted}: {one} must have {expected}")
        if not bool(inputs[one].isfinite().all()):
            raise ConfigError(f"{one} is NaN or infinite at some positions")
