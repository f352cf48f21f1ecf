"""The model of a conversation: blocks on the swarm, and perhaps an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from swarm_plugins.backbone import AutoSwarmModelForCausalLM
from swarm_plugins.callbacks.loading import load_adapter
from swarm_plugins.errors import ConfigError
from swarm_plugins.talk.tokenizer import load_tokenizer

__all__ = ["LoadedModel", "load_for_chat", "split_tag"]


class LoadedModel(NamedTuple):
    """What is needed to talk."""

    model: Any
    tokenizer: PreTrainedTokenizerBase


def load_for_chat(
    name: str, peers: list[str], *, adapter: str | None, revision: str | None, endpoint: str | None
) -> LoadedModel:
    """Loads model, adapter and tokenizer.

    Args:
        name: Directory of the model, or its id on the Hub.
        peers: Addresses to join the swarm by.
        adapter: Folder, or ``REPO[@TAG]``.
        revision: Of the model.
        endpoint: Address of the adapter's Hub.

    Raises:
        ConfigError: If there are no peers, or model or tokenizer do not exist.
    """
    if not peers:
        raise ConfigError(
            "no address of the swarm: give --initial-peers ADDRESS as `swarm serve` prints it, "
            "or set SWARM_INITIAL_PEERS"
        )
    model: Any = AutoSwarmModelForCausalLM.from_pretrained(name, revision=revision, initial_peers=peers)
    tokenizer = load_tokenizer(name, revision)
    if adapter is not None:
        repo, tag = split_tag(adapter)
        model = load_adapter(model, repo, tag, endpoint=endpoint)
    return LoadedModel(model.eval(), tokenizer)


def split_tag(adapter: str) -> tuple[str | Path, str]:
    """Returns folder or repository, and version, of ``DIR|REPO[@TAG]``.

    Raises:
        ConfigError: If the tag is empty.
    """
    folder = Path(adapter).expanduser()
    if folder.is_dir():
        return folder, "latest"
    repo, at, tag = adapter.partition("@")
    if not repo or (at and not tag):
        raise ConfigError(f"--adapter {adapter!r} must be a folder, USER/NAME or USER/NAME@TAG")
    return repo, tag or "latest"
