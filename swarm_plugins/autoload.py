"""Makes the strategy name ``swarm`` known to Lightning, whichever of its packages is imported, and whenever.

Lightning has no entry point for strategies: a name is known once it stands in the registry of the package in use
(``lightning.*`` or ``pytorch_lightning``/``lightning_fabric``, Trainer or Fabric). `install` registers in those that
are imported already and watches for the others; nothing heavy is imported here, the strategy itself only when a
Trainer or Fabric asks for it.

It runs on ``import swarm_plugins``. The entry point of torch's backends runs it too, at the end of ``import torch``,
so that ``fabric run --strategy swarm`` knows the name before any script of the user runs. That group is made for
devices; ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` switches it off, and then the import of the package is what counts.
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
# Module with a registry -> the registry's name, and the class to make, as module:name in swarm_plugins.strategy.
_REGISTRIES = {
    "lightning.pytorch.strategies": ("StrategyRegistry", "unified:SwarmStrategy"),
    "lightning.fabric.strategies": ("STRATEGY_REGISTRY", "unified:FabricSwarmStrategy"),
    "pytorch_lightning.strategies": ("StrategyRegistry", "standalone:SwarmStrategy"),
    "lightning_fabric.strategies": ("STRATEGY_REGISTRY", "standalone_fabric:FabricSwarmStrategy"),
}


def install() -> None:
    """Registers the strategy where Lightning is imported, and sees to the rest. Never raises; may be called again."""
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
    # Missing while the module is being imported: then its import ends in the watcher.
    if registry is not None:
        registry.register(NAME, _creator(target), description="Blocks on a swarm, adapters here", override=True)


def _creator(target: str) -> Callable[..., Any]:
    module_name, _, class_name = target.partition(":")

    def create(**options: Any) -> Any:
        return getattr(importlib.import_module(f"swarm_plugins.strategy.{module_name}"), class_name)(**options)

    return create


class _Watcher:
    """A finder that finds nothing by itself: it registers the strategy once a module with a registry was imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec that the usual finder gives, with a loader that registers afterwards."""
        if name not in _REGISTRIES:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Registering(spec.loader)  # type: ignore[assignment]
        return spec


class _Registering:
    """Loads a module by its own loader, gives it back, and registers the strategy."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Leaves it to the module's own loader."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Runs the module, then registers; from then on nothing shows that it was watched."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        try:
            _register(module)
        except Exception:  # as in `install`
            log.warning("the strategy %r could not be registered in %s", NAME, module.__name__, exc_info=True)
