"""gguf-py, which is an extra."""

from __future__ import annotations

from typing import Any

from swarm_plugins.errors import naming_extras


def gguf_py() -> Any:
    """Returns the package.

    Raises:
        MissingExtraError: If it is not installed.
    """
    with naming_extras():
        import gguf
    return gguf
