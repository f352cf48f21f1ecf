"""The swarm's side of a comparison: the model served on this machine, in turns with the local one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from transformers import PreTrainedModel

from swarm_plugins.backbone.auto import AutoSwarmModelForCausalLM
from recipes.benchmarks.arms import frozen
from recipes.benchmarks.figures import Figure
from recipes.benchmarks.measure import Arm, take_turns
from swarm_plugins.client import SwarmConfig, SwarmConnection, connect
from swarm_plugins.errors import ConfigError
from swarm_plugins.local_swarm import LocalSwarm


def swarm_model(directory: Path, initial_peers: Sequence[str], config: SwarmConfig | None = None) -> PreTrainedModel:
    """Loads the client's share of the model; its blocks run on the swarm."""
    return model_on(directory, connect(initial_peers, config or SwarmConfig()))


def model_on(directory: Path, connection: SwarmConnection, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Loads the client's share of the model, whose blocks run on the servers of a connection."""
    return frozen(AutoSwarmModelForCausalLM.from_pretrained(directory, connection=connection, dtype=dtype))


def served_model(
    stack: ExitStack, directory: Path, *, dtype: str, **options: Any
) -> tuple[PreTrainedModel, tuple[int, ...]]:
    """Serves a model by one process with one thread until a stack closes; both sides compute in a type.

    Returns:
        The client's share of the model, and the ids of all processes.
    """
    swarm = stack.enter_context(LocalSwarm(directory, num_servers=1, threads=1, dtype=dtype, **options))
    connection = connect(swarm.initial_peers, SwarmConfig())
    stack.callback(connection.close)
    pids = (os.getpid(), *(server.pid for server in swarm.servers))
    return model_on(directory, connection, getattr(torch, dtype)), pids


def serving(width: str) -> dict[str, Any]:
    """Returns the options of servers that keep their weights in a width.

    Raises:
        ConfigError: If it is unknown.
    """
    if width in ("float32", "bfloat16", "float16"):
        return {"dtype": width}
    if width in ("int8", "int4", "nf4"):
        return {"dtype": "float32", "quantization": width}
    raise ConfigError(f"unknown width {width!r}; known: float32, bfloat16, float16, int8, int4, nf4")


def weight_bytes(model: PreTrainedModel, blocks: range) -> int:
    """Returns the bytes in memory of some blocks' weights in a local model."""
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    return sum(tensor.numel() * tensor.element_size() for index in blocks for tensor in layers[index].parameters())


def compare(
    name: str, unit: str, here: Arm, there: Arm, *, goal: float | None = None, rounds: int, progress: Progress
) -> Figure:
    """Runs the local model and the swarm in turns; returns milliseconds of both and the ratio of their speeds."""
    take_turns(name, [here, there], rounds=rounds, progress=progress)
    return Figure(
        name=name,
        unit=unit,
        local=here.median_s * 1e3,
        swarm=there.median_s * 1e3,
        ratio=here.median_s / there.median_s,
        goal=goal,
        cpu_ratio=there.cpu_ratio(here),
        rounds=rounds,
    )
