"""Settings of an API."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_plugins.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ApiSettings:
    """Bounds and keys of an API."""

    api_keys: tuple[str, ...] = ()
    """Every request must carry one of these keys, as ``Authorization: Bearer KEY``. Empty: no key is needed."""

    max_running: int = 8
    """Requests that generate at once; 64 further ones wait their turn."""

    max_running_per_key: int = 8
    """Requests of one key that generate or wait at once."""

    max_context_tokens: int | None = None
    """Longest prompt and answer together. None: what the model reads."""

    cache_bytes: int = 1 << 30
    """Most bytes of keys and values in all conversations kept for their next turn, here or on servers."""

    load_adapters: bool = False
    """Let requests name any adapter on the Hub, and not only those given at the start."""

    def __post_init__(self) -> None:
        bounds = {"max_running": 1, "max_running_per_key": 1, "cache_bytes": 0}
        if self.max_context_tokens is not None:
            bounds["max_context_tokens"] = 2
        for name, least in bounds.items():
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(f"{name} must be a whole number, {least} or more; got {value!r}")
        if any(not key or not key.isascii() or not key.isprintable() or " " in key for key in self.api_keys):
            raise ConfigError("an API key must be printable ASCII characters without spaces; one of those given is not")
