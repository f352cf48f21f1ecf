"""Settings of an API."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_plugins.errors import ConfigError

_OPTIONAL = ("max_running_per_key", "max_context_tokens")


@dataclass(frozen=True, kw_only=True)
class ApiSettings:
    """Bounds and keys of an API."""

    api_keys: tuple[str, ...] = ()
    """Every request must carry one of these keys, as ``Authorization: Bearer KEY``. Empty: no key is needed."""

    max_running: int = 8
    """Requests that generate at once; 64 further ones wait their turn."""

    max_running_per_key: int | None = None
    """Requests of one key that generate or wait at once. None: of several keys, three quarters of ``max_running``."""

    max_context_tokens: int | None = None
    """Longest prompt and answer together. None: what the model reads."""

    cache_bytes: int = 1 << 30
    """Most bytes of keys and values in all conversations kept for their next turn, here or on servers."""

    load_adapters: bool = False
    """Let requests name any adapter on the Hub, and not only those given at the start."""

    def __post_init__(self) -> None:
        bounds = {"max_running": 1, "max_running_per_key": 1, "max_context_tokens": 2, "cache_bytes": 0}
        for name, least in bounds.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if type(value) is not int or value < least:
                raise ConfigError(f"{name} must be a whole number, {least} or more; got {value!r}")
        if any(not key or not key.isascii() or not key.isprintable() or " " in key for key in self.api_keys):
            raise ConfigError("an API key must be printable ASCII characters without spaces; one of those given is not")

    @property
    def most_of_a_key(self) -> int:
        """Requests of one key that generate or wait at once: a key must not hold what the others wait for."""
        if self.max_running_per_key is not None:
            return self.max_running_per_key
        return max(1, self.max_running * 3 // 4) if len(self.api_keys) > 1 else self.max_running
