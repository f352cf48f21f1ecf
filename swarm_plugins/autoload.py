"""Registers the strategy name ``swarm`` in every package of Lightning, imported before or after this one.

Lightning has no entry point for strategies: a name must be in the registry of the package in use (``lightning.*`` or
``pytorch_lightning``/``lightning_fabric``, Trainer or Fabric). `install` registers in the imported ones and watches for
the others; the strategy itself is imported only when a Trainer or Fabric needs it.

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

NAME = "swarm"
# Module with a registry -> name of the registry, and module:class in swarm_plugins.strategy.
_REGISTRIES = {
    "lightning.pytorch.strategies": ("StrategyRegistry", "unified:SwarmStrategy"),
    "lightning.fabric.strategies": ("STRATEGY_REGISTRY", "unified:FabricSwarmStrategy"),
    "pytorch_lightning.strategies": ("StrategyRegistry", "standalone:SwarmStrategy"),
    "lightning_fabric.strategies": ("STRATEGY_REGISTRY", "standalone_fabric:FabricSwarmStrategy"),
}


def install() -> None:
    """Registers the strategy in all registries, now or when they are imported. Never raises; may be called again."""
    # An exception here would make ``import torch`` fail for programs that have nothing to do with this package.
    try:
        for name in _REGISTRIES:
            if name in sys.modules:
                _register(sys.modules[name])
        if not any(isinstance(finder, _Watcher) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Watcher())
    except Exception:
        log.warning("the strategy %r could not be registered", NAME, exc_info=True)


def _register(module: ModuleType) -> None:
    registry_name, target = _REGISTRIES[module.__name__]
    registry = getattr(module, registry_name, None)
    # Missing while the module is being imported: the watcher registers at the end of that import.
    if registry is not None:
        registry.register(NAME, _creator(target), description="Blocks on a swarm, adapters here", override=True)


def _creator(target: str) -> Callable[..., Any]:
    module_name, _, class_name = target.partition(":")

    def create(**options: Any) -> Any:
        return getattr(importlib.import_module(f"swarm_plugins.strategy.{module_name}"), class_name)(**options)

    return create


class _Watcher:
    """A finder that registers the strategy after a module with a registry is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the usual spec, with a loader that registers afterwards."""
        if name not in _REGISTRIES:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Registering(spec.loader)  # type: ignore[assignment]
        return spec


class _Registering:
    """Loads a module with its own loader, then restores that loader and registers the strategy."""

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
        try:
            _register(module)
        except Exception:  # as in `install`
            log.warning("the strategy %r could not be registered in %s", NAME, module.__name__, exc_info=True)
