"""Widths of weights on the command line: ``8``, ``4``, ``nf4``."""

from __future__ import annotations

from swarm_plugins.errors import ConfigError
from swarm_plugins.offload.widths import Width

__all__ = ["parse_width"]


def parse_width(option: str, text: str, allowed: tuple[Width, ...]) -> Width:
    """Returns the width that a text names.

    Args:
        option: Where it was given, for the message.
        text: What was given.
        allowed: The widths that it can be.

    Raises:
        ConfigError: If it is none of them.
    """
    names = {str(width): width for width in allowed}
    if text not in names:
        raise ConfigError(f"{option} is {text}; allowed are {', '.join(names)}")
    return names[text]
