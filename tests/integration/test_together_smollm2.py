"""Trainers in processes of their own improve an adapter of a real model, see `test_together`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import run_process
import trainer_kit

from swarm_plugins.demo import smollm2

pytestmark = trainer_kit.IN_A_RUN
# Fixtures.
swarm, peers = trainer_kit.swarm, trainer_kit.peers
start, warm_trainers = run_process.start, run_process.warm_trainers


@pytest.fixture(scope="module")
def model() -> Path:
    return smollm2()


def test_survivors_have_the_same_adapter_after_each_round(start: Callable[..., run_process.Process]) -> None:
    run_process.check_survivors(start, num_rounds=8)
