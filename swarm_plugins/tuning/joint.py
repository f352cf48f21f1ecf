"""Computes calls of several models in one pass: each row of a batch takes its own adapter."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from peft import PeftModel, PeftType
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor

from swarm_plugins.backbone.peft_parts import plain_path
from swarm_plugins.backbone.standin import StandIn
from swarm_plugins.backbone.twin import twin
from swarm_plugins.errors import SwarmError
from swarm_plugins.noise import without_tied_remark
from swarm_plugins.offload.model.experts import OffloadedExperts
from swarm_plugins.tuning.computing import Computed, Part, run_pass
from swarm_plugins.tuning.datums import Datum, LossCall
from swarm_plugins.tuning.tuner import Tuner

log = logging.getLogger(__name__)
_OTHER_WEIGHTS = ("modules_to_save", "trainable_token_indices", "layer_replication")


class Call(NamedTuple):
    """A training call of one model."""

    tuner: Tuner
    datums: Sequence[Datum]
    loss: LossCall


class _Copy(NamedTuple):
    """A copy of the base that has the adapters of some models."""

    model: Any
    names: dict[Tuner, str]
    """How it calls the adapter of each."""


class Joint:
    """A copy of the base that has the adapters of several models, whose tensors it shares. For one thread at a time.

    Args:
        base: The base model; it is not changed.
    """

    def __init__(self, base: Any) -> None:
        self._base = base
        self._copy = _Copy(None, {})
        self._lock = threading.Lock()
        self._is_possible = True

    def clear(self) -> None:
        """Forgets all models, also while a pass is computed; safe in any thread."""
        with self._lock:
            self._copy = _Copy(None, {})

    def can_take(self, tuner: Tuner) -> bool:
        """Returns whether a model's rows can be in a batch with others'."""
        return self._is_possible and has_rows(tuner.model)

    def compute(self, calls: Sequence[Call], *, backward: bool) -> list[list[Computed] | Exception]:
        """Computes the calls of different models, as `Tuner.compute` does each.

        A call that fails takes none with it: then each is computed by itself.
        """
        if len(calls) == 1:
            return [_alone(calls[0], backward=backward)]
        before = [_gradients(call.tuner) for call in calls]
        try:
            shared = self._with([call.tuner for call in calls])
            parts = [Part(call.datums, call.loss, shared.names[call.tuner]) for call in calls]
            found: list[Any] = run_pass(shared.model, parts, backward=backward)
        except Exception as exc:  # noqa: BLE001 - each of the calls says what it is, if it is its own
            self.clear()  # after an error, PEFT leaves the hooks that name each row's adapter in the copy
            for call, gradients in zip(calls, before, strict=True):
                _set_gradients(call.tuner, gradients)
            if isinstance(exc, ValueError | TypeError) and not isinstance(exc, SwarmError):
                # A layer that sees no rows, as PEFT says it; it will not see any next time. Servers may be well again.
                self._is_possible = False
                log.warning("training calls of several models are computed apart from now on: %s", exc)
            return [_alone(call, backward=backward) for call in calls]
        for call, result in zip(calls, found, strict=True):
            if backward and isinstance(result, Exception):
                call.tuner.fail(str(result))
            elif backward:
                call.tuner.added()
        return found

    def _with(self, tuners: Sequence[Tuner]) -> _Copy:
        """Returns the copy; made anew if it lacks one of some models.

        Its tensors come last: while PEFT puts an adapter in, it changes which tensors of the others are trained.
        """
        with self._lock:
            known = self._copy
        if all(tuner in known.names for tuner in tuners):
            return known
        names = {tuner: f"row{number}" for number, tuner in enumerate(dict.fromkeys([*known.names, *tuners]))}
        configs = {name: copy.deepcopy(tuner.model.active_peft_config) for tuner, name in names.items()}
        (first, config), *others = configs.items()
        # PEFT's own way to make adapters without memory (`low_cpu_mem_usage`) changes torch for all threads.
        with torch.device("meta"), without_tied_remark():
            model = PeftModel(twin(self._base), config, adapter_name=first)
            for name, config in others:
                model.add_adapter(name, config)
        places = dict(_tuned(model))
        for tuner, name in names.items():
            for place, layer in _tuned(tuner.model):
                _share(layer, places[place], str(tuner.model.active_adapter), name)
        made = _Copy(model.eval(), names)
        with self._lock:
            if self._copy is known:  # else it was cleared meanwhile: one of these models has gone
                self._copy = made
        return made


def has_rows(model: Any) -> bool:
    """Returns whether all layers of a model's adapter can apply it to some rows of a batch."""
    config = model.active_peft_config
    if config.peft_type != PeftType.LORA or any(getattr(config, one, None) for one in _OTHER_WEIGHTS):
        return False
    return all(_has_rows(layer) for _, layer in _tuned(model))


def _has_rows(layer: Any) -> bool:
    if not isinstance(layer, LoraLayer) or layer.lora_variant:
        return False
    # PEFT's wrapper adds to the weight itself, for all rows. Servers and offloaded experts do not.
    return not isinstance(layer, ParamWrapper) or isinstance(layer.get_base_layer(), StandIn | OffloadedExperts)


def _tuned(model: Any) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yields PEFT's layers by where they are: the module's path, and the parameter's name if it is one's."""
    for path, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            yield (plain_path(path), getattr(module, "parameter_name", "")), module


def _share(source: Any, target: Any, active: str, name: str) -> None:
    """Gives a layer another one's adapter under a name."""
    for kind in source.adapter_layer_names:
        parts = getattr(source, kind, {})
        if active in parts:
            getattr(target, kind)[name] = parts[active]
    target.scaling[name] = source.scaling[active]


def _alone(call: Call, *, backward: bool) -> list[Computed] | Exception:
    try:
        return call.tuner.compute(call.datums, call.loss, backward=backward)
    except Exception as exc:  # noqa: BLE001 - its client gets it as an answer
        return exc


def _gradients(tuner: Tuner) -> list[Tensor | None]:
    return [None if one.grad is None else one.grad.clone() for one in tuner.parameters.values()]


def _set_gradients(tuner: Tuner, gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(tuner.parameters.values(), gradients, strict=True):
        parameter.grad = gradient
