"""SmolLM2-135M-Instruct, where it is on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from swarm_plugins.checkpoint.range_cache import default_cache
from swarm_plugins.demo import smollm2


def smollm2_directory() -> Path:
    """Returns the model; skips the test unless it is there, as making it takes minutes, or ``SWARM_TEST_SMOLLM2=1``."""
    there = default_cache() / "SmolLM2-135M-Instruct"
    if not (there / "model.safetensors").is_file() and os.environ.get("SWARM_TEST_SMOLLM2") != "1":
        pytest.skip(f"{there} has not been made: run with SWARM_TEST_SMOLLM2=1 to make it")
    return smollm2()
