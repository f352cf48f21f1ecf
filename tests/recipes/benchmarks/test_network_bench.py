"""The bench of servers at a distance checks every side that it measures."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
from rich.progress import Progress
from transformers import PreTrainedModel

from recipes.benchmarks.arms import local_model
from recipes.benchmarks.links import Link
from recipes.benchmarks.network import run
from swarm_plugins.errors import SwarmError
from swarm_plugins.testing.models import save_tiny


class NoServers(nullcontext[None]):
    servers = ()
    initial_peers = ()


@pytest.mark.parametrize("wrong", ["star", "pushing"])
def test_wrong_gradients_are_found_on_each_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    model = save_tiny("llama", tmp_path / "model", num_layers=2)

    def load(directory: Path, peers: Sequence[str]) -> AbstractContextManager[tuple[PreTrainedModel, PreTrainedModel]]:
        star, pushing = local_model(directory), local_model(directory)
        {"star": star, "pushing": pushing}[wrong].get_output_embeddings().weight.data *= 1.01
        return nullcontext((star, pushing))

    swarm = NoServers()
    monkeypatch.setattr(run, "LocalSwarm", lambda *args, **settings: swarm)
    monkeypatch.setattr(run, "swarm_models", load)
    # Nothing is measured before the gradients agree.
    monkeypatch.setattr(run, "_sent_per_token", lambda *args: pytest.fail("a wrong gradient was not found"))
    link = Link(rtt_ms=1)
    with Progress(disable=True) as progress, pytest.raises(SwarmError, match="gradient: the swarm's result differs"):
        run.bench_network(
            model,
            link=link,
            server_link=link,
            num_servers=2,
            prefix_tokens=4,
            new_tokens=2,
            rounds=1,
            progress=progress,
        )
