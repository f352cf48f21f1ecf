"""How the next token is chosen: the model's own settings, for ``swarm chat``, ``swarm run`` and other front ends."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from swarm_plugins.errors import CheckpointError, ConfigError

_TOP_K = 50
"""What ``generate()`` of transformers takes when nothing is said."""
_GREEDY_BELOW = 1e-4
"""Logits divided by less may leave the range of float32."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen.

    Args:
        temperature: 0 for greedy decoding: always the likeliest token. 1: as the model says; above: more evenly.
        top_p: Choose among the likeliest tokens that together have this probability.
        top_k: Choose among this many of the likeliest tokens; 0: among all.
        min_p: Leave out tokens less likely than this share of the likeliest one.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            ConfigError: If a value has another type or is out of range.
        """
        for name, most in (("temperature", math.inf), ("top_p", 1), ("min_p", 1)):
            value: Any = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and 0 <= value <= most and value != math.inf):
                raise ConfigError(f"{name} is {value!r}; expected 0 {'or more' if most > 1 else 'to 1'}")
        if type(self.top_k) is not int or self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k!r}; expected a whole number, 0 (all tokens) or more")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW

    def options(self) -> dict[str, Any]:
        """Returns the arguments of ``generate()``, in place of the model's own settings."""
        if self.is_greedy:
            return {"do_sample": False}
        return {
            "do_sample": True,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p or None,
        }


def default_sampling(model: Any, **asked: float | None) -> Sampling:
    """Returns how ``model.generate()`` chooses tokens by default, with what is asked for instead.

    It samples only if the model's generation config says so. A model without one is decoded greedily, and so is
    SmolLM2-135M-Instruct, whose config has no settings for sampling. ``generate()`` applies other settings of the
    config, such as ``repetition_penalty``, by itself.

    Args:
        model: A model of transformers.
        **asked: Fields of `Sampling`, such as ``temperature=0.7``. None: the model's own.

    Raises:
        ConfigError: If a value asked for is out of range.
        CheckpointError: If a setting of the model cannot be used.
    """
    config = getattr(model, "generation_config", None)
    own = {name: getattr(config, name, None) for name in ("temperature", "top_p", "top_k", "min_p")}
    settings: dict[str, Any] = {"temperature": 1.0, "top_k": _TOP_K}
    settings |= {name: value for name, value in own.items() if value is not None}
    if not getattr(config, "do_sample", None):
        settings["temperature"] = 0.0
    try:
        sampling = Sampling(**settings)
    except ConfigError as error:
        raise CheckpointError(f"the model's generation_config.json cannot be used: {error}; correct it") from error
    changes: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    return replace(sampling, **changes)
