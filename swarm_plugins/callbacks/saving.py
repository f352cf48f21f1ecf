"""Writes one version of an adapter as a folder: PEFT's files, the card and ``swarm.json``.

The folder gets its name once it is complete, so that no half version is published.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path

from peft import PeftModel
from peft.utils.other import EMBEDDING_LAYER_NAMES
from torch import nn

from swarm_plugins.backbone.served import served_blocks
from swarm_plugins.backbone.version import base_blocks, base_version
from swarm_plugins.errors import ConfigError, SwarmError
from swarm_plugins.hub import AdapterFacts, Manifest, PushTarget, ServedSpan, card_text
from swarm_plugins.hub.folder import CARD_FILE, CONFIG_FILE, WEIGHTS_FILE, write_folder
from swarm_plugins.versions import ModelVersion

log = logging.getLogger(__name__)

_TASKS = {
    "CAUSAL_LM": "text-generation",
    "SEQ_CLS": "text-classification",
    "TOKEN_CLS": "token-classification",
    "QUESTION_ANS": "question-answering",
    "FEATURE_EXTRACTION": "feature-extraction",
}
_CLASS_TASKS = {"ForCausalLM": "text-generation", "ForSequenceClassification": "text-classification"}


@dataclass(frozen=True, kw_only=True)
class AdapterSource:
    """A trained adapter and its base."""

    model: PeftModel
    """PEFT's model."""
    name: str
    """PEFT's name of the adapter."""
    base: ModelVersion | None
    """The version of the base; None if unknown."""
    blocks: tuple[str, ...] = ()
    """Fingerprint of each block of the base; empty if unknown."""

    @property
    def peft_type(self) -> str:
        return _word(self.model.peft_config[self.name].peft_type)

    @property
    def pipeline_tag(self) -> str:
        """The Hub's word for the task."""
        known = _TASKS.get(_word(self.model.peft_config[self.name].task_type))
        name = type(self.model.get_base_model()).__name__
        by_class = (tag for ending, tag in _CLASS_TASKS.items() if name.endswith(ending))
        return known or next(by_class, "feature-extraction")


def _word(value: object) -> str:
    # PEFT takes members of its enums and plain strings.
    return str(getattr(value, "value", value))


def find_adapter(module: nn.Module) -> AdapterSource:
    """Returns the adapter to be trained in a module.

    Raises:
        ConfigError: If the module has none.
    """
    models = [part for part in module.modules() if isinstance(part, PeftModel)]
    trained = [model for model in models if any(parameter.requires_grad for parameter in model.parameters())]
    if not trained:
        found = "its PEFT model has no trainable parameters" if models else "it holds no model made by PEFT"
        raise ConfigError(
            f"{type(module).__name__} has no adapter to publish: {found}; wrap the base with "
            "peft.get_peft_model(base, LoraConfig(...)) before training (in configure_model with Lightning); a whole "
            "model, such as a student, is published afterwards, by save_student and 'swarm push'"
        )
    model = trained[0]
    active = model.active_adapter
    name = active if isinstance(active, str) else active[0]
    return AdapterSource(model=model, name=name, base=base_version(model), blocks=blocks_of(model))


def blocks_of(model: PeftModel) -> tuple[str, ...]:
    """Returns the fingerprint of each block of an adapter's base; empty if they cannot be read, or are on the Hub."""
    try:
        return base_blocks(model)
    except SwarmError as exc:
        # Only diagnostics.
        log.warning("the adapter is published without fingerprints of the base's blocks: %s", exc)
        return ()


def write_version(
    source: AdapterSource, root: Path, name: str, facts: AdapterFacts, manifest: Manifest, target: PushTarget
) -> tuple[Path, str]:
    """Writes a version into a new folder of ``root``, numbered if ``name`` is taken.

    Returns:
        The folder, and the digest of the adapter's tensors.

    Raises:
        OSError: If it cannot be written; nothing is left behind.
    """
    digest = ""

    def write(folder: Path) -> None:
        nonlocal digest
        save_peft(source, folder, facts.base_model, with_embeddings=_changes_embeddings(source))
        manifest.write(folder)
        (folder / CARD_FILE).write_text(card_text(facts, manifest), encoding="utf-8")
        target.write(folder)
        with (folder / WEIGHTS_FILE).open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()

    return write_folder(root / name, write), digest


def save_peft(source: AdapterSource, folder: Path, base_model: str | None, *, with_embeddings: bool) -> None:
    """Writes PEFT's files of an adapter, with the base's name and commit in its config."""
    source.model.save_pretrained(
        str(folder),
        safe_serialization=True,
        selected_adapters=[source.name],
        # "auto" would ask the Hub for the base's config, in the middle of training.
        save_embedding_layers=with_embeddings,
    )
    if source.name != "default":
        # PEFT writes other names to a subfolder.
        for path in (folder / source.name).iterdir():
            path.replace(folder / path.name)
        (folder / source.name).rmdir()
    # PEFT's template; the card is written when the adapter is published.
    (folder / CARD_FILE).unlink(missing_ok=True)
    path = folder / CONFIG_FILE
    config = json.loads(path.read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = base_model
    # A local base has no commit; swarm.json has its fingerprint.
    config["revision"] = source.base.revision if source.base is not None and not source.base.is_local else None
    path.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def _changes_embeddings(source: AdapterSource) -> bool:
    targets = getattr(source.model.peft_config[source.name], "target_modules", None)
    names = () if isinstance(targets, str) else targets or ()
    return any(name.split(".")[-1] in EMBEDDING_LAYER_NAMES for name in names)


def manifest_of(source: AdapterSource, *, event: str, step: int | None, metrics: dict[str, float]) -> Manifest:
    """Returns the content of ``swarm.json`` for the adapter as it is now."""
    spans = [
        ServedSpan(start=blocks.start, end=blocks.end, dtype=blocks.dtype, quantization=blocks.quantization)
        for blocks in served_blocks(source.model)
    ]
    return Manifest(
        base_name=None if source.base is None else source.base.name,
        base_revision=None if source.base is None else source.base.revision,
        block_fingerprints=source.blocks,
        spans=tuple(spans),
        peft_type=source.peft_type,
        event=event,
        step=step,
        metrics=metrics,
    )
