"""Registers our names in the registries of other packages, imported before or after this one.

Lightning has no entry point for strategies: the names ``swarm`` and ``expert_parallel`` must be in the registry of the
package in use (``lightning.*`` or ``pytorch_lightning``/``lightning_fabric``, Trainer or Fabric). The same holds for
the experts implementation ``swarm_table`` of transformers and the model type ``prmoe`` of its `AutoConfig`. `install`
registers in the imported packages and watches for the others; what a name stands for is imported only when it is used,
but for the config class of ``prmoe``, which is light: its models are imported when the first of its configs is made.

It runs on ``import swarm_plugins``, and at the end of ``import torch`` through the entry point of torch's backends, so
that ``fabric run --strategy swarm`` knows the name before a user's script runs. That entry point is made for devices;
``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` switches it off, and importing this package still works.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

log = logging.getLogger(__name__)

EXPERTS = "swarm_table"
# Module with a registry -> name of the registry, file in a room of swarm_plugins.strategy, what its class begins with.
_REGISTRIES = {
    "lightning.pytorch.strategies": ("StrategyRegistry", "unified", ""),
    "lightning.fabric.strategies": ("STRATEGY_REGISTRY", "unified", "Fabric"),
    "pytorch_lightning.strategies": ("StrategyRegistry", "standalone", ""),
    "lightning_fabric.strategies": ("STRATEGY_REGISTRY", "standalone_fabric", "Fabric"),
}
# Name, which is also the room's -> class, description.
_STRATEGIES = {
    "swarm": ("SwarmStrategy", "Blocks on a swarm, adapters here"),
    "expert_parallel": ("ExpertParallelStrategy", "Experts divided over ranks, a batch for each"),
}


def install() -> None:
    """Registers all names, now or when the registries are imported. Never raises; may be called again."""
    # An exception here would make ``import torch`` fail for programs that have nothing to do with this package.
    try:
        halfway = {
            name for name, register in _WATCHED.items() if name in sys.modules and not register(sys.modules[name])
        }
        if not any(isinstance(finder, _Watcher) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Watcher(halfway))
    except Exception:
        log.warning("the names of swarm_plugins could not be registered", exc_info=True)


def _register_strategy(module: ModuleType) -> bool:
    registry_name, file, kind = _REGISTRIES[module.__name__]
    registry = getattr(module, registry_name, None)
    # Missing while the module is being imported: the watcher registers later.
    if registry is not None:
        for name, (class_name, description) in _STRATEGIES.items():
            create = _creator(f"{name}.{file}", f"{kind}{class_name}")
            registry.register(name, create, description=description, override=True)
    return registry is not None


def _creator(module_name: str, class_name: str) -> Callable[..., Any]:
    def create(**options: Any) -> Any:
        return getattr(importlib.import_module(f"swarm_plugins.strategy.{module_name}"), class_name)(**options)

    return create


def _register_experts(module: ModuleType) -> bool:
    registry = getattr(module, "ALL_EXPERTS_FUNCTIONS", None)
    if registry is not None:
        registry.register(EXPERTS, _run_experts)
    return registry is not None


def _run_experts(*args: Any, **kwargs: Any) -> Any:
    return importlib.import_module("swarm_plugins.moe.table").run_table(*args, **kwargs)


def _register_model(module: ModuleType) -> bool:
    if "AutoConfig" not in vars(module):
        # Nothing else need be imported between the end of this module and the first look-up of a model type.
        module.__class__ = _HalfwayAutoConfig
        return True
    module.__class__ = ModuleType
    config_class = importlib.import_module("swarm_plugins.models.prmoe.configuration").PRMoEConfig
    module.AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    return True


class _HalfwayAutoConfig(ModuleType):
    """`AutoConfig`'s module if its import had begun before: registers when that class is first taken out of it."""

    def __getattribute__(self, name: str) -> Any:
        """Returns the attribute; once the module is complete, its class is the usual one again."""
        if name in ("AutoConfig", "CONFIG_MAPPING"):
            _registered(self)
        return ModuleType.__getattribute__(self, name)


def _register_trainer(module: ModuleType) -> bool:
    # Missing while the module is being imported: the watcher looks again.
    if (trainer := getattr(module, "Trainer", None)) is not None:
        importlib.import_module("swarm_plugins.adapter_saves").explain_refused_pushes(trainer)
    return trainer is not None


_WATCHED: dict[str, Callable[[ModuleType], bool]] = {
    **dict.fromkeys(_REGISTRIES, _register_strategy),
    "transformers.integrations.moe": _register_experts,
    "transformers.models.auto.configuration_auto": _register_model,
    "transformers.trainer": _register_trainer,
}
"""Module with a registry -> what registers in it once the module is imported; it returns False if that is too early."""


class _Watcher:
    """A finder that registers names after a module with a registry is imported.

    Args:
        halfway: Modules whose import had begun before (it imported torch, which called `install`): they are looked at
            again whenever something else is imported.
    """

    def __init__(self, halfway: set[str]) -> None:
        self._halfway = halfway

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the usual spec, with a loader that registers afterwards."""
        if self._halfway:
            self._halfway = {one for one in self._halfway if one in sys.modules and not _registered(sys.modules[one])}
        if name not in _WATCHED:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Registering(spec.loader)  # type: ignore[assignment]
        return spec


class _Registering:
    """Loads a module with its own loader, then restores that loader and registers our names."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Delegates to the module's own loader."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Runs the module, then registers; the module shows no trace of being watched."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _registered(module)


def _registered(module: ModuleType) -> bool:
    """Registers in a module; returns False if it is too early."""
    try:
        return _WATCHED[module.__name__](module)
    except Exception:  # as in `install`
        log.warning("the names of swarm_plugins could not be registered in %s", module.__name__, exc_info=True)
        return True
