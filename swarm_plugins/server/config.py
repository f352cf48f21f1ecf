"""Settings of a server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from swarm_plugins.errors import ConfigError
from swarm_plugins.offload.config import OffloadConfig
from swarm_plugins.server.service_limits import ServiceLimits

__all__ = ["DEFAULT_HOST_MADDRS", "DTYPES", "QUANTIZATIONS", "ServeConfig"]

DTYPES = ("float32", "bfloat16", "float16")
DEFAULT_HOST_MADDRS = ("/ip4/127.0.0.1/tcp/0",)
"""Reachable from this machine only: nothing is offered to the world by default."""
QUANTIZATIONS = ("none", "int8", "nf4")


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """What to serve, how to join the swarm, and what clients may take."""

    model: str
    """Directory, or id of a repository on the Hub."""

    revision: str | None = None
    """Branch, tag or commit on the Hub. None: ``main``."""

    blocks: range | None = None
    """The span. None: chosen, see ``num_blocks``."""

    part: tuple[int, int] | None = None
    """``(k, n)``: the k-th, from 1, of n equal parts of the model. An alternative to ``blocks``."""

    num_blocks: int | None = None
    """Length of the span that the swarm lacks most. None, without ``blocks``: as many as memory holds."""

    initial_peers: tuple[str, ...] = ()
    """Addresses to join by. Empty: a swarm of one's own."""

    host_maddrs: tuple[str, ...] = DEFAULT_HOST_MADDRS
    """Addresses to listen on."""

    announce_maddrs: tuple[str, ...] = ()
    """Addresses that others are told, if not those listened on."""

    identity: Path | None = None
    """File of the key that makes the peer id. None: a new id each time."""

    device: str = "cpu"
    """Device to compute on, as torch names it."""

    dtype: str | None = None
    """Floating type to compute in. None: the checkpoint's."""

    quantization: str = "none"
    """How the weights are kept: ``none``, ``int8`` or ``nf4``."""

    offload: OffloadConfig | None = None
    """Budgets of experts that stay on disk. None: all weights are loaded."""

    kv_bytes: int = 1 << 30
    """Budget for the keys and values of all sessions."""

    activation_bytes: int = 1 << 29
    """Budget for forward graphs kept for the backward to come; 0 keeps none."""

    adapter_bytes: int = 1 << 29
    """Budget for the adapters that clients upload."""

    adapters: tuple[str, ...] = ()
    """Published adapters to hold: directories, or ``REPO`` or ``REPO@TAG`` on the Hub."""

    max_pack_tokens: int = 1024
    """Tokens in one packed forward of session steps."""

    limits: ServiceLimits = field(default_factory=ServiceLimits)
    """What one client, and one request, may take."""

    announce_every_s: float = 20.0
    """Time between announcements."""

    announce_ttl_s: float = 60.0
    """Life of an announcement."""

    show_progress: bool = False
    """Whether loading shows a progress bar on standard error."""

    grace_s: float = 5.0
    """How long ``close`` lets running requests finish."""

    def __post_init__(self) -> None:
        """Checks the settings."""
        if not self.model:
            raise ConfigError("model is empty: give a directory or the id of a repository on the Hub")
        given = list(self._span_choices())
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} exclude each other: give one")
        if self.part is not None and not 1 <= self.part[0] <= self.part[1]:
            raise ConfigError(f"part {self.part[0]}/{self.part[1]} is no part: K/N with 1 <= K <= N is allowed")
        if self.blocks is not None and (self.blocks.step != 1 or not 0 <= self.blocks.start < self.blocks.stop):
            raise ConfigError(
                f"blocks {self.blocks.start}:{self.blocks.stop} are no span: START:END with 0 <= START < END is allowed"
            )
        if self.num_blocks is not None and self.num_blocks < 1:
            raise ConfigError(f"num_blocks must be at least 1, got {self.num_blocks}")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(f"unknown dtype {self.dtype!r}; known: {', '.join(DTYPES)}")
        if self.quantization not in QUANTIZATIONS:
            raise ConfigError(f"unknown quantization {self.quantization!r}; known: {', '.join(QUANTIZATIONS)}")
        self._check_numbers()

    def _span_choices(self) -> Iterator[str]:
        if self.blocks is not None:
            yield f"blocks {self.blocks.start}:{self.blocks.stop}"
        if self.part is not None:
            yield f"part {self.part[0]}/{self.part[1]}"
        if self.num_blocks is not None:
            yield f"num_blocks {self.num_blocks}"

    def _check_numbers(self) -> None:
        for name in ("kv_bytes", "max_pack_tokens", "announce_every_s", "announce_ttl_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)!r}")
        for name in ("activation_bytes", "adapter_bytes", "grace_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be 0 or more, got {getattr(self, name)!r}")
        if self.announce_ttl_s < 2 * self.announce_every_s:
            raise ConfigError(
                f"announce_ttl_s is {self.announce_ttl_s:g}, announce_every_s {self.announce_every_s:g}: "
                "an announcement must outlive the next one, so at least twice as long"
            )

    def span_of(self, num_blocks: int) -> range | None:
        """Returns the span that the settings name in a model of ``num_blocks``; None if it is to be chosen.

        Raises:
            ConfigError: If the model does not have these blocks.
        """
        if self.num_blocks is not None and self.num_blocks > num_blocks:
            raise ConfigError(f"num_blocks is {self.num_blocks}, {self.model} has only {num_blocks} blocks")
        if self.part is not None:
            index, count = self.part
            if count > num_blocks:
                raise ConfigError(f"{self.model} has {num_blocks} blocks, which cannot be cut in {count} parts")
            return range((index - 1) * num_blocks // count, index * num_blocks // count)
        if self.blocks is not None and self.blocks.stop > num_blocks:
            raise ConfigError(
                f"blocks {self.blocks.start}:{self.blocks.stop} are not all in {self.model}: "
                f"it has {num_blocks} blocks, 0:{num_blocks} at most"
            )
        return self.blocks
