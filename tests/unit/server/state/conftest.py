from __future__ import annotations

import pytest

from swarm_plugins.blocks import Span
from swarm_plugins.blocks.load import load_span
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.testing.models import save_tiny


@pytest.fixture(scope="package")
def span(tmp_path_factory: pytest.TempPathFactory) -> Span:
    return load_span(Checkpoint.open(str(save_tiny("mixtral", tmp_path_factory.mktemp("model")))), range(4))
