"""The models that are compared at a distance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from transformers import PreTrainedModel

from recipes.benchmarks.arms import check_directory, local_model
from recipes.benchmarks.swarm import model_on
from swarm_plugins.client import SwarmConfig, connect
from swarm_plugins.speculation.speculation import check_vocabulary
from swarm_plugins.talk.loading import load_draft


def load_models(directory: Path, draft: str | None) -> tuple[PreTrainedModel, PreTrainedModel | str | None]:
    """Loads the local model and its draft: a small model of a directory, ``lookup``, or none.

    Raises:
        ConfigError: If a directory does not hold a model, or the draft has another vocabulary.
    """
    check_directory(directory)
    drafter = None if draft is None else load_draft(draft)
    local = local_model(directory)
    if isinstance(drafter, PreTrainedModel):
        check_vocabulary(local, drafter)
    return local, drafter


@contextmanager
def swarm_models(directory: Path, initial_peers: Sequence[str]) -> Iterator[tuple[PreTrainedModel, PreTrainedModel]]:
    """Gives two models on a swarm: one whose client carries hidden states, and one whose servers push them.

    Neither cuts batches into chunks: the bounds they are compared with assume whole batches.
    """
    carrying, pushing = (connect(initial_peers, SwarmConfig(push=push, micro_batches=1)) for push in ("off", "on"))
    with carrying, pushing:
        yield model_on(directory, carrying), model_on(directory, pushing)
