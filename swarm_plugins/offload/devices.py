"""Where a model with offloaded experts may compute."""

from __future__ import annotations

import torch

from swarm_plugins.errors import ConfigError

__all__ = ["choose_device"]


def choose_device(wanted: str | torch.device | None) -> torch.device:
    """Returns the device to compute on.

    Args:
        wanted: What the user said; None: a CUDA device if there is one, else the CPU.

    Raises:
        ConfigError: If there is no such device, or it is none that experts are offloaded for.
    """
    try:
        found = torch.device(wanted if wanted is not None else "cuda" if torch.cuda.is_available() else "cpu")
    except (RuntimeError, TypeError) as exc:
        raise ConfigError(f"device is {wanted!r}; allowed are 'cpu', 'cuda' and 'cuda:N'") from exc
    if found.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {str(found)!r}; experts are offloaded for 'cpu', 'cuda' and 'cuda:N'")
    num_devices = torch.cuda.device_count() if found.type == "cuda" else 0
    if found.type == "cuda" and (found.index or 0) >= num_devices:
        raise ConfigError(
            f"device is {str(found)!r}, but torch finds {num_devices} CUDA devices: take another one, or 'cpu'"
        )
    return found
