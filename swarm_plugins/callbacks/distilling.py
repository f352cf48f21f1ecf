"""Common to the callbacks of staged distillation: which model is the student, and what its config says afterwards."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel

from swarm_plugins.backbone.version import base_version
from swarm_plugins.distill.distillation import Distillation, Teacher
from swarm_plugins.distill.pair import check_tokenizers, public_name
from swarm_plugins.errors import ConfigError, SwarmError

log = logging.getLogger(__name__)


class StagedTraining(Distillation):
    """Staged distillation inside a Trainer; the module stays as it is.

    The student's forward must get ``labels``, and its output's ``loss`` must be what is trained: the distillation term
    is part of it. The teacher stays outside of the trained module. It is freed at the stop if the callback holds the
    only reference to it: write ``StagedDistillation(load(...), ...)``, or give a directory, a Hub id or a function.

    Args:
        teacher: A causal language model with the student's vocabulary, on the student's device: plain, offloaded
            (`load_offloaded`) or remote (`AutoSwarmModelForCausalLM`); or a function that returns one, or a directory
            or Hub id. These are loaded when training starts, and not at all if the stop has passed.
        stop_at: First optimizer step without distillation, as an integer; or a fraction of the run, as a float from 0.0
            to 1.0. A resumed run keeps the step of the first one.
        alpha: Weight of the term, from 0 to 1. The student's own loss keeps the weight 1.
        temperature: Softens both distributions.
        schedule: ``stop``: the full weight until the stop. ``linear``: the weight falls to zero at the stop.
        student: Path of the student in the trained module, such as ``model``. None: the module's only model of
            transformers.

    Raises:
        ConfigError: If a setting is wrong.
    """

    def __init__(
        self,
        teacher: Teacher,
        stop_at: int | float,
        alpha: float = 1.0,
        temperature: float = 1.0,
        schedule: Literal["stop", "linear"] = "stop",
        student: str | None = None,
    ) -> None:
        super().__init__(teacher, stop_at=stop_at, alpha=alpha, temperature=temperature, schedule=schedule)
        self.student = student
        self._revision: str | None = None
        self._record: dict[str, Any] = {}
        self._is_checked = False

    def start(self, module: nn.Module, total_steps: float, step: int, tokenizer: object = None) -> None:
        """Finds the student in a module, begins, and writes the provenance into the student's config.

        Args:
            module: What is trained.
            total_steps: Optimizer steps of the whole run.
            step: Optimizer steps done so far.
            tokenizer: The student's, if the Trainer knows it, to compare the teacher's with.

        Raises:
            ConfigError: If there is no student, or the teacher does not fit it.
        """
        student = find_student(module, self.student, self._source)
        self._is_checked = False
        teacher = self.begin(student, total_steps, step)
        if teacher is not None:
            self._check_teacher(module, teacher, tokenizer)
            self._revision = _revision_of(teacher)
        self._write_record(student)

    def move_on(self, step: int) -> None:
        """Moves on after a training step (or a part of one, before its optimizer step); at the stop, frees the teacher.

        Raises:
            ConfigError: If nothing was distilled in the first step.
        """
        if not self._is_checked and self.weight > 0:
            self._is_checked = True
            if self.num_teacher_forwards == 0:
                self.end()
                raise ConfigError(
                    "the first training step went by without distillation: no forward pass of the student had labels; "
                    "pass labels= to it and train its output's loss (label smoothing and compute_loss_func of "
                    "transformers' Trainer take the labels away), or add swarm_plugins.distill.distillation_loss(...) "
                    "to your own loss"
                )
        self.at(step)
        if self.stop_step is not None:
            self._record["distilled_steps"] = min(step, self.stop_step) if self.schedule.alpha else 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the stop and the teacher's name, for a resumed run."""
        return {**super().state_dict(), "teacher": public_name(self.name), "teacher_revision": self._revision}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.name = self.name or state.get("teacher") or ""
        self._revision = state.get("teacher_revision")

    def _check_teacher(self, module: nn.Module, teacher: nn.Module, tokenizer: object) -> None:
        try:
            taught = {id(one) for one in teacher.parameters()}
            inside = [name for name, one in module.named_parameters() if id(one) in taught]
            if inside:
                raise ConfigError(
                    f"the teacher is part of {type(module).__name__} ({inside[0]}): it would be trained, saved and "
                    "never freed; give it to the callback alone"
                )
            check_tokenizers(tokenizer, self.name)
        except ConfigError:
            self.end()
            raise

    def _write_record(self, student: nn.Module) -> None:
        config = getattr(student, "config", None)
        if config is None:
            return
        known = getattr(config, "distillation", None) or {}
        self._record = {
            **known,
            "teacher": public_name(self.name) or known.get("teacher"),
            "teacher_revision": self._revision or known.get("teacher_revision"),
            "stop_step": self.stop_step,
            "alpha": self.schedule.alpha,
            "temperature": self.temperature,
            "schedule": self.schedule.kind,
        }
        config.distillation = self._record


def find_student(module: nn.Module, path: str | None, teacher: object) -> nn.Module:
    """Returns the student in a trained module.

    Raises:
        ConfigError: If the path does not exist, or there is not exactly one model of transformers.
    """
    found = dict(_models(module, ""))
    if len(found) > 1:
        found = {name: one for name, one in found.items() if one is not teacher}
    if path is not None:
        try:
            return module.get_submodule(path)
        except AttributeError as error:
            raise ConfigError(
                f"student={path!r}: {type(module).__name__} has no such module; its models of transformers are "
                f"{', '.join(found) or '(none)'}"
            ) from error
    if len(found) != 1:
        raise ConfigError(
            f"{type(module).__name__} has {len(found)} models of transformers ({', '.join(found) or 'none'}), one was "
            "expected: name the student by its path, such as student='model'"
        )
    return next(iter(found.values()))


def _models(module: nn.Module, path: str) -> Iterator[tuple[str, PreTrainedModel]]:
    """Yields models of transformers that are not part of another one, with their paths."""
    if isinstance(module, PreTrainedModel):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _models(child, f"{path}.{name}" if path else name)


def _revision_of(teacher: nn.Module) -> str | None:
    try:
        version = base_version(teacher)
    except SwarmError as error:
        # Only provenance.
        log.warning("the student's config will not name the teacher's version: %s", error)
        return None
    return None if version is None else version.revision
