"""Names of a package that are imported when they are first used, as PEP 562 lets them be."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from swarm_plugins.errors import naming_extras
from swarm_plugins.noise import without_kernel_remark


class LazyNames:
    """The names of a package: ``__getattr__, __dir__ = lazy.get, lazy.list``.

    Args:
        package: Its ``__name__``.
        homes: The module of each name; one that begins with a dot lies in the package.
    """

    def __init__(self, package: str, homes: dict[str, str]) -> None:
        self.package = package
        self.homes = homes

    def get(self, name: str) -> Any:
        """Returns what has the name; imports its module if need be.

        Raises:
            AttributeError: If the package has no such name.
            MissingExtraError: If the module needs a package of an extra that is not installed.
        """
        if name not in self.homes:
            raise AttributeError(f"module {self.package!r} has no attribute {name!r}")
        with without_kernel_remark(), naming_extras():  # PEFT imports bitsandbytes
            value = getattr(importlib.import_module(self.homes[name], self.package), name)
        setattr(sys.modules[self.package], name, value)  # where it is found from now on
        return value

    def list(self) -> list[str]:
        """Returns all names, loaded or not."""
        return sorted({*vars(sys.modules[self.package]), *self.homes})
