from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from swarm_plugins.testing.models import save_tiny


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns a function that returns the directory of a family's tiny model."""
    saved: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in saved:
            saved[family] = save_tiny(
                family, tmp_path_factory.mktemp("models") / family, num_layers=4 if family == "prmoe" else 2
            )
        return saved[family]

    return get


@pytest.fixture(scope="session")
def mixtral(model_of: Callable[[str], Path]) -> Path:
    return model_of("mixtral")
