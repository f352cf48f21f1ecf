"""Speculation at a distance: several tokens a trip, against one token a trip that the client carries."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from rich.progress import Progress
from transformers import PreTrainedModel

from recipes.benchmarks.figures import Figure
from recipes.benchmarks.measure import Arm, take_turns
from recipes.benchmarks.network.chat import CHAT, REPEATING, Requests, answering
from swarm_plugins.speculation import Speculation
from swarm_plugins.speculation.speculation import LOOKUP

_CHAT_GOAL = 2.5
_LOOKUP_GOAL = 3.0


def drafting_figures(
    directory: Path,
    local: PreTrainedModel,
    star: PreTrainedModel,
    pushing: PreTrainedModel,
    *,
    draft: PreTrainedModel | str,
    new_tokens: int,
    rounds: int,
    progress: Progress,
) -> list[Figure]:
    """Compares speculation over pushing servers with plain decoding by the client.

    Args:
        directory: The model.
        local: The model here: its tokens are expected.
        star: The swarm's, whose client carries hidden states.
        pushing: The swarm's, whose servers push.
        draft: Drafts for the chat texts; texts that repeat their prompt are looked up.
        new_tokens: Tokens of each answer, at most.
        rounds: Rounds whose medians are shown.
        progress: Shows how far it is.

    Raises:
        SwarmError: If tokens differ from the local model's.
    """
    figures: list[Figure] = []
    kinds: list[tuple[str, Requests, PreTrainedModel | str, float]] = [
        ("text that repeats its prompt", REPEATING, LOOKUP, _LOOKUP_GOAL)
    ]
    if draft != LOOKUP:
        kinds.insert(0, ("chat", CHAT, draft, _CHAT_GOAL))
    for name, requests, drafter, goal in kinds:
        run = answering(directory, local, requests, new_tokens)
        speculation = Speculation(drafter)
        arms = [Arm(partial(run, model, one), (os.getpid(),)) for model, one in ((star, None), (pushing, speculation))]
        take_turns(name, arms, rounds=rounds, progress=progress)
        figures += _figures(name, drafter, speculation.counts.tokens_per_round, *arms, goal=goal)
    return figures


def _figures(
    name: str, drafter: PreTrainedModel | str, tokens_per_trip: float, plain: Arm, drafted: Arm, *, goal: float
) -> list[Figure]:
    kind, trip_goal = ("looked up", None) if drafter == LOOKUP else ("drafted", _CHAT_GOAL)
    return [
        Figure(
            name=f"{name}: a token by the client / {kind}, pushed",
            unit="ms",
            local=plain.median_s * 1e3,
            swarm=drafted.median_s * 1e3,
            ratio=plain.median_s / drafted.median_s,
            goal=goal,
            rounds=len(plain.samples),
        ),
        Figure(
            name=f"{name}: {kind}, tokens a trip",
            unit="tokens",
            local=1.0,
            swarm=tokens_per_trip,
            ratio=tokens_per_trip,
            goal=trip_goal,
            rounds=len(plain.samples),
        ),
    ]
