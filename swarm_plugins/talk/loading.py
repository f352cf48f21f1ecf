"""Loads a model for a command, in the place where it runs: a swarm, this machine's disk, or its memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from swarm_plugins.backbone.auto import AutoSwarmModelForCausalLM
from swarm_plugins.backbone.context import SwarmSettings
from swarm_plugins.callbacks.loading import load_adapter
from swarm_plugins.errors import ConfigError, one_line
from swarm_plugins.model_names import expanded
from swarm_plugins.offload import OffloadConfig, load_offloaded
from swarm_plugins.offload.stats import OffloadStats
from swarm_plugins.speculation.speculation import LOOKUP
from swarm_plugins.talk.turns import load_tokenizer
from swarm_plugins.weights.linears import quantize_linears


class LoadedModel(NamedTuple):
    """A model ready to talk with."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    stats: Callable[[], OffloadStats] | None = None
    """Counters of offloaded experts, if there are any."""


def load_model(
    name: str,
    place: SwarmSettings | OffloadConfig | None,
    *,
    adapter: str | None = None,
    revision: str | None = None,
    endpoint: str | None = None,
    device: str | None = None,
    prepare: Callable[[Any], object] | None = None,
) -> LoadedModel:
    """Loads a model with its tokenizer.

    Args:
        name: Directory or Hub id.
        place: The swarm that runs its blocks, or how its experts are offloaded. None: all of it is in memory here.
        adapter: ``DIR|REPO[@TAG]`` of an adapter to load into it.
        revision: Branch, tag or commit of the model on the Hub.
        endpoint: Address of the adapter's Hub. None: ``HF_ENDPOINT``.
        device: Where it runs, or what of it runs here. None: a CUDA device if there is any; for a swarm, the CPU.
        prepare: Called with the model before the adapter is loaded.

    Raises:
        ConfigError: If model, tokenizer or adapter do not exist.
    """
    stats = None
    if isinstance(place, SwarmSettings):
        peers, config = place.initial_peers, place.config
        model: Any = AutoSwarmModelForCausalLM.from_pretrained(
            name, revision=revision, initial_peers=peers, swarm=config, device=device
        )
        tokenizer = load_tokenizer(name, revision)
    else:
        tokenizer = load_tokenizer(name, revision)
        if place is None:
            model = _in_memory(name, revision, device or ("cuda" if torch.cuda.is_available() else "cpu"))
        else:
            model = load_offloaded(name, place, revision=revision, device=device)
            stats = model.offload_stats
    if prepare is not None:
        prepare(model)
    if adapter is not None:
        model = load_adapter(model, *split_tag(adapter), endpoint=endpoint)
    return LoadedModel(model.eval(), tokenizer, stats)


def _in_memory(name: str, revision: str | None, device: str) -> PreTrainedModel:
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(str(expanded(name)), revision=revision, dtype="auto")
    except (OSError, ValueError) as error:
        raise ConfigError(f"the model {name!r} cannot be loaded ({one_line(error)}): give another one") from error
    loaded: PreTrainedModel = model.to(device)
    return loaded


def check_draft(draft: str, model: str, revision: str | None) -> None:
    """Raises ConfigError unless a draft model has the tokenizer of the model; reads no weights."""
    if draft == LOOKUP:
        return
    its_own, wanted = (load_tokenizer(*one).get_vocab() for one in ((draft, None), (model, revision)))
    if its_own != wanted:
        raise ConfigError(
            f"the draft model {draft!r} has another vocabulary ({len(its_own)} tokens) than {model!r} ({len(wanted)}): "
            "a draft must share the model's tokenizer; give a smaller model of the same family, or lookup"
        )


def load_draft(draft: str) -> PreTrainedModel | str:
    """Loads a draft model, from a directory or the Hub; ``lookup`` needs none.

    On a CPU its linear layers are kept in 4 bits, which halves its time and hardly changes what it drafts.

    Raises:
        ConfigError: If the model does not exist or is not a causal language model.
    """
    if draft == LOOKUP:
        return LOOKUP
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(str(expanded(draft)), dtype="auto")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the draft model {draft!r} cannot be loaded ({one_line(error)}): give another one"
        ) from error
    model.eval().requires_grad_(False)
    if model.device.type == "cpu":
        quantize_linears(model, 4)
    return model


def split_tag(adapter: str) -> tuple[str | Path, str]:
    """Returns folder or repository, and version, of ``DIR|REPO[@TAG]``; raises ConfigError if one is empty."""
    folder = expanded(adapter)
    if folder.is_dir():
        return folder, "latest"
    repo, at, tag = adapter.partition("@")
    if not repo or (at and not tag):
        raise ConfigError(f"invalid --adapter {adapter!r}: expected a folder, USER/NAME or USER/NAME@TAG")
    return repo, tag or "latest"
