"""Which implementations of exchanges can run a model."""

from __future__ import annotations

import pytest

from swarm_plugins.errors import ConfigError
from swarm_plugins.parallel.implementations import OWN_IMPLEMENTATIONS, check_drops


@pytest.mark.parametrize("name", ["all_to_all", "auto"])
def test_exchanges_that_know_no_dropped_tokens_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' cannot run a model with capacity_factor, .*: use flat_all_to_all"):
        check_drops(name)


@pytest.mark.parametrize("name", [*OWN_IMPLEMENTATIONS, "all_reduce"])
def test_the_others_are_not(name: str) -> None:
    check_drops(name)
