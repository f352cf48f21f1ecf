"""Loads the model of a conversation: blocks on the swarm or experts on disk, with or without an adapter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from swarm_plugins.backbone.auto import AutoSwarmModelForCausalLM
from swarm_plugins.callbacks.loading import load_adapter
from swarm_plugins.client.config import SwarmConfig
from swarm_plugins.errors import ConfigError, one_line
from swarm_plugins.offload import OffloadConfig, load_offloaded
from swarm_plugins.offload.formats.linears import quantize_linears
from swarm_plugins.offload.stats import OffloadStats
from swarm_plugins.speculation.speculation import LOOKUP
from swarm_plugins.talk.turns import load_tokenizer


class LoadedModel(NamedTuple):
    """A model ready to talk with."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    stats: Callable[[], OffloadStats] | None = None
    """Counters of offloaded experts, if there are any."""


def load_for_chat(
    name: str,
    peers: list[str],
    config: SwarmConfig,
    *,
    adapter: str | None,
    revision: str | None,
    endpoint: str | None,
) -> LoadedModel:
    """Loads a model whose blocks run on the swarm, with tokenizer and, from ``DIR|REPO[@TAG]``, an adapter.

    Raises:
        ConfigError: If model, tokenizer or adapter do not exist.
    """
    model: Any = AutoSwarmModelForCausalLM.from_pretrained(name, revision=revision, initial_peers=peers, swarm=config)
    tokenizer = load_tokenizer(name, revision)
    return LoadedModel(_with_adapter(model, adapter, endpoint), tokenizer)


def load_whole(name: str, *, adapter: str | None, revision: str | None, endpoint: str | None) -> LoadedModel:
    """Loads a model with all of its weights in this process, with tokenizer and, from ``DIR|REPO[@TAG]``, an adapter.

    Raises:
        ConfigError: If model, tokenizer or adapter do not exist.
    """
    tokenizer = load_tokenizer(name, revision)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(name, revision=revision, dtype="auto")
    except (OSError, ValueError) as error:
        raise ConfigError(f"the model {name!r} cannot be loaded ({one_line(error)}): give another one") from error
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    return LoadedModel(_with_adapter(model, adapter, endpoint), tokenizer)


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
        ConfigError: If the model does not exist or is no causal language model.
    """
    if draft == LOOKUP:
        return LOOKUP
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(draft, dtype="auto")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the draft model {draft!r} cannot be loaded ({one_line(error)}): give another one"
        ) from error
    model.eval().requires_grad_(False)
    if model.device.type == "cpu":
        quantize_linears(model, 4)
    return model


def load_for_run(
    name: str, config: OffloadConfig, *, adapter: str | None, revision: str | None, device: str | None
) -> LoadedModel:
    """Loads a model with offloaded experts, with tokenizer and, from ``DIR|REPO[@TAG]``, an adapter.

    Raises:
        ConfigError: If model, tokenizer or adapter do not exist.
    """
    tokenizer = load_tokenizer(name, revision)
    model: Any = load_offloaded(name, config, revision=revision, device=device)
    return LoadedModel(_with_adapter(model, adapter), tokenizer, model.offload_stats)


def _with_adapter(model: Any, adapter: str | None, endpoint: str | None = None) -> Any:
    if adapter is not None:
        repo, tag = split_tag(adapter)
        model = load_adapter(model, repo, tag, endpoint=endpoint)
    return model.eval()


def split_tag(adapter: str) -> tuple[str | Path, str]:
    """Returns folder or repository, and version, of ``DIR|REPO[@TAG]``; raises ConfigError if one is empty."""
    folder = Path(adapter).expanduser()
    if folder.is_dir():
        return folder, "latest"
    repo, at, tag = adapter.partition("@")
    if not repo or (at and not tag):
        raise ConfigError(f"invalid --adapter {adapter!r}: expected a folder, USER/NAME or USER/NAME@TAG")
    return repo, tag or "latest"
