"""Writes a distilled model as a folder to upload: weights, config, tokenizer, and the card that names its teacher."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swarm_plugins.errors import ConfigError
from swarm_plugins.hub.card import student_card_text
from swarm_plugins.hub.folder import CARD_FILE, PushTarget
from swarm_plugins.hub.names import check_repo_id
from swarm_plugins.hub_errors import repo_id_fault
from swarm_plugins.model_names import expanded


def save_student(
    model: Any,
    folder: str | Path,
    *,
    repo_id: str | None = None,
    tokenizer: Any = None,
    metrics: Mapping[str, float] | None = None,
    state_dict: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a student with its card, ready for ``swarm push FOLDER``, and returns the folder.

    The card names the teacher with its version, the kept layers, the stop step, alpha, temperature and schedule, from
    the model's ``config.distillation``. Its tag ``swarm-teacher:VERSION`` finds the students of a teacher on a Hub.

    Args:
        model: A model of transformers made by `make_student` or trained with `StagedDistillation`.
        folder: Where to write.
        repo_id: The repository that the card names and ``swarm push`` publishes to. None: the card has the folder's
            name, and ``swarm push`` needs ``--repo``.
        tokenizer: Saved with the model, if given.
        metrics: Shown on the card, by name.
        state_dict: The whole weights, if a strategy has divided the model's over ranks. None: the model's.

    Raises:
        ConfigError: If the model was not distilled, or the repository's name is not possible.
    """
    record = getattr(model.config, "distillation", None)
    if not record:
        raise ConfigError(
            f"config.distillation of {type(model).__name__} is {record!r}: its card could not name a teacher; make the "
            "model with make_student, or train it with StagedDistillation"
        )
    place = expanded(folder)
    name = place.absolute().name if repo_id is None else check_repo_id(repo_id)
    model.save_pretrained(place, state_dict=state_dict)
    if tokenizer is not None:
        tokenizer.save_pretrained(place)
    is_ours = type(model).__module__.startswith("swarm_plugins.")
    text = student_card_text(name, record, metrics=metrics, is_on_hub=_is_on_hub(record), needs_package=is_ours)
    (place / CARD_FILE).write_text(text, encoding="utf-8")
    if repo_id is not None:
        PushTarget(repo_id=repo_id).write(place)
    return place


def _is_on_hub(record: Mapping[str, Any]) -> bool:
    # A commit; the version of a directory begins with "local-".
    teacher, revision = record.get("teacher") or "", record.get("teacher_revision") or "local-"
    return repo_id_fault(teacher) is None and not revision.startswith("local-")
