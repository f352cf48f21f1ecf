"""Clients that run at the same time: the window in which they all do, and the check of what they got."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from recipes.benchmarks.sessions.clients import Done
from recipes.benchmarks.sessions.clients import together as shared_time
from swarm_plugins.child import Child
from swarm_plugins.errors import SwarmError

STATES = torch.arange(12.0).reshape(1, 3, 4)


class Client:
    def __init__(self, states: Tensor, times: list[float]) -> None:
        self._done = Done(states.numpy().tobytes(), times)
        self.jobs: list[object] = []

    def send(self, message: object) -> None:
        self.jobs.append(message)

    def receive(self, kind: Any) -> Done:
        return self._done


def together(*clients: Client) -> float:
    return shared_time([cast(Child, client) for client in clients], [STATES] * len(clients))


def test_only_the_time_in_which_all_run_counts() -> None:
    clients = [Client(STATES, [0.0, 2.0, 4.0]), Client(STATES, [1.0, 3.0, 5.0])]
    assert together(*clients) == (4.0 - 1.0) / 3  # tokens at 2, 3 and 4
    assert [client.jobs for client in clients] == [[3], [3]]
    with pytest.raises(SwarmError, match="did not overlap: run more than 3 tokens"):
        together(Client(STATES, [0.0, 1.0, 2.0]), Client(STATES, [3.0, 4.0, 5.0]))


@pytest.mark.parametrize("wrong", [0.1, float("nan")])
def test_other_hidden_states_than_the_local_models_end_the_run(wrong: float) -> None:
    rounded = STATES * (1 + 1e-6)
    assert together(Client(rounded, [0.0, 1.0, 2.0])) == 1.0
    other = STATES.clone()
    other[0, 1, 2] += wrong
    with pytest.raises(SwarmError, match="1 at a time: hidden states differ from the local model's by"):
        together(Client(other, [0.0, 1.0, 2.0]))
