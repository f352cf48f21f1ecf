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
    """Requests that generate at once; further ones wait their turn."""

    max_waiting: int = 64
    """Requests that wait; further ones are refused."""

    max_running_per_key: int = 8
    """Requests of one key that generate or wait at once."""

    max_answers: int = 8
    """Most answers (``n``, times the prompts) of one request."""

    max_body_bytes: int = 4 << 20
    """Longest request."""

    max_context_tokens: int | None = None
    """Longest prompt and answer together. None: what the model can read."""

    max_caches: int = 32
    """Most conversations kept for their next turn. Each one is a session on every server of its chain."""

    cache_bytes: int = 1 << 30
    """Most bytes of keys and values in all kept conversations together, here or on servers."""

    cache_age_s: float = 300.0
    """Seconds that they are kept."""

    load_adapters: bool = False
    """Whether a request may name any adapter on the Hub. If not, those given at the start are all."""

    max_adapters: int = 16
    """Most adapters in memory."""

    def __post_init__(self) -> None:
        for name in ("max_running", "max_running_per_key", "max_answers", "max_body_bytes", "max_adapters"):
            _check_whole(name, getattr(self, name), 1)
        for name in ("max_waiting", "max_caches", "cache_bytes"):
            _check_whole(name, getattr(self, name), 0)
        if self.max_context_tokens is not None:
            _check_whole("max_context_tokens", self.max_context_tokens, 2)
        if not 0 <= self.cache_age_s < float("inf"):
            raise ConfigError(f"cache_age_s must be a number of seconds, 0 or more; got {self.cache_age_s!r}")
        if any(not key or not key.isascii() or not key.isprintable() or " " in key for key in self.api_keys):
            raise ConfigError("an API key must be printable ASCII characters without spaces; one of those given is not")


def _check_whole(name: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        raise ConfigError(f"{name} must be a whole number, {least} or more; got {value!r}")
