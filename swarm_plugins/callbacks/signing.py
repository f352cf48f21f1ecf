"""Writes the version of the base next to an adapter that PEFT saves: card, config and ``swarm.json``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from huggingface_hub import ModelCard
from peft import PeftModel

from swarm_plugins.backbone.version import loaded_version
from swarm_plugins.callbacks.saving import AdapterSource, blocks_of, manifest_of
from swarm_plugins.hub.folder import CARD_FILE


def is_signed(model: PeftModel) -> bool:
    """Returns whether this package has loaded the base of an adapter."""
    return loaded_version(model) is not None


def write_card(model: PeftModel, folder: str, write: Callable[[PeftModel, str], None]) -> None:
    """Writes the card as PEFT does, with tags that were there before, and ``swarm.json``; names the base's commit.

    Args:
        model: PEFT's model.
        folder: Where the adapter is saved; it exists.
        write: PEFT's own method, which writes a card or changes the one in the folder.
    """
    version, path = loaded_version(model), Path(folder, CARD_FILE)
    if version is None:
        write(model, folder)
        return
    before = set(ModelCard.load(path).data.tags or ()) if path.is_file() else set()
    write(model, folder)
    card = ModelCard.load(path)
    tags = before | set(card.data.tags or ())
    if version.is_local:
        # The Hub refuses a card whose base is the path of a directory.
        tags = {tag for tag in tags if not tag.startswith("base_model:")}
        card.data.base_model = None
    card.data.tags = sorted(tags)
    card.save(path)
    for config in model.peft_config.values():
        config.revision = None if version.is_local else version.revision
    active = model.active_adapter
    name = active if isinstance(active, str) else active[0]
    source = AdapterSource(model=model, name=name, base=version, blocks=blocks_of(model))
    manifest_of(source, event="save", step=None, metrics={}).write(Path(folder))
