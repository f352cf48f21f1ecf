"""Staged distillation for any training loop: teacher and text until the stop, then the text alone."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from swarm_plugins.distill.pair import check_pair, load_teacher, name_of
from swarm_plugins.distill.schedule import Schedule, check_temperature
from swarm_plugins.distill.term import DistillationTerm, Tally
from swarm_plugins.errors import ConfigError

log = logging.getLogger(__name__)

Teacher = nn.Module | Callable[[], nn.Module] | str | Path


class Distillation:
    """Adds ``alpha * T**2 * KL(teacher || student)`` to a student's training loss until a step, then frees the teacher.

    Staged knowledge distillation of DeepSpeed-MoE (section 4.2): the student learns from teacher and text first, and
    from the text alone after the stop, since late in training distillation harms a student of less capacity.

    The term enters by a forward hook on the student: a forward with gradients and with ``labels`` returns an output
    whose ``loss`` includes it. Steps are optimizer steps, as the trainer counts them.

    ```python
    distillation = Distillation(teacher, stop_at=1000)
    distillation.begin(student, total_steps=1500)
    for step, batch in enumerate(batches):
        distillation.at(step)
        student(**batch).loss.backward()
        ...
    distillation.end()
    ```

    Args:
        teacher: A causal language model with the student's vocabulary, on the student's device; or a function that
            returns one, or a directory or Hub id. These are loaded when training starts, and not at all if the stop has
            passed.
        stop_at: First step without the term, as an integer; or a fraction of the run, as a float from 0.0 to 1.0.
        alpha: Weight of the term, from 0 to 1. The student's own loss keeps the weight 1, as in the paper.
        temperature: Softens both distributions.
        schedule: ``stop``: the full weight until the stop. ``linear``: the weight falls to zero at the stop.

    Raises:
        ConfigError: If a setting is wrong.
    """

    def __init__(
        self,
        teacher: Teacher,
        *,
        stop_at: int | float,
        alpha: float = 1.0,
        temperature: float = 1.0,
        schedule: Literal["stop", "linear"] = "stop",
    ) -> None:
        self.schedule = Schedule(stop_at=stop_at, alpha=alpha, kind=schedule)
        check_temperature(temperature)
        if not isinstance(teacher, nn.Module | str | Path) and not callable(teacher):
            raise ConfigError(
                f"teacher is a {type(teacher).__name__}; expected a model, a function that returns one, a directory or "
                "an id on the Hub"
            )
        self.temperature = temperature
        self.stop_step: int | None = None
        """First step without the term; None before training starts."""
        self.is_stopped = False
        """Whether the stop has passed."""
        self.weight = 0.0
        """Weight of the term at the current step; 0 after the stop."""
        self.name = name_of(teacher)
        """The teacher's directory or Hub id; empty if unknown."""
        self._source: Teacher | None = teacher
        self._term: DistillationTerm | None = None
        self._tally = Tally()
        self._hook: RemovableHandle | None = None
        self._loaded_stop: tuple[int | float, int] | None = None

    @property
    def num_teacher_forwards(self) -> int:
        """Teacher forwards since training started last."""
        return self._tally.num_forwards

    def begin(self, student: nn.Module, total_steps: float, step: int = 0) -> nn.Module | None:
        """Resolves the stop, loads the teacher and attaches the hook; none of it if the stop has passed.

        Args:
            student: The model whose forward takes ``input_ids`` and ``labels`` and returns ``loss`` and ``logits``.
            total_steps: Optimizer steps of the whole run, for a stop given as a fraction.
            step: Optimizer steps done so far.

        Returns:
            The teacher; None if it is not needed any more.

        Raises:
            ConfigError: If the teacher does not fit the student.
        """
        self.end()
        self.stop_step = self._resolve_stop(total_steps)
        self.is_stopped = False
        self._tally = Tally()
        if self.schedule.alpha == 0 or step >= self.stop_step:
            self.at(step)
            return None
        teacher = self._load(student)
        check_pair(student, teacher)
        self.name = self.name or name_of(teacher)
        self._term = DistillationTerm(teacher, self.temperature, self._tally)
        self._hook = student.register_forward_hook(self._term, with_kwargs=True)
        self.at(step)
        return teacher

    def at(self, step: int) -> None:
        """Sets the weight for an optimizer step, counted from 0; at the stop, frees the teacher."""
        if self.stop_step is None:
            raise ConfigError("call begin(student, total_steps) before the first step")
        self.weight = self.schedule.weight(step, self.stop_step)
        if self._term is not None:
            self._term.weight = self.weight
        if step >= self.stop_step and not self.is_stopped:
            self.is_stopped = True
            self._source = None if isinstance(self._source, nn.Module) else self._source
            if self._term is not None:
                self.end()
                log.info("distillation stopped at step %d: the teacher is freed", step)

    def pause(self) -> None:
        """Leaves forward passes alone until the next call of `at`."""
        if self._term is not None:
            self._term.weight = 0.0

    def end(self) -> None:
        """Detaches the hook and drops a teacher that was loaded here."""
        if self._hook is None:
            return
        self._hook.remove()
        self._hook = self._term = None
        # Models hold reference cycles: without this their memory stays until some later collection.
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def take_metrics(self) -> dict[str, Tensor]:
        """Returns the student's own loss and the distillation loss per token since the last call, if there were any.

        ``lm_loss`` and ``kd_loss``, both without the weight.
        """
        return self._tally.take()

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs: the setting, and the step it came to."""
        return {"stop_at": self.schedule.stop_at, "stop_step": self.stop_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the stop of the run that is resumed, also if this run is longer.

        A changed ``stop_at`` is a wish to move the stop: then the new one counts.
        """
        stop_at, stop_step = state.get("stop_at"), state.get("stop_step")
        if stop_at is not None and stop_step is not None:
            self._loaded_stop = (stop_at, int(stop_step))

    def _resolve_stop(self, total_steps: float) -> int:
        # For this run alone: the next one may be another.
        loaded, self._loaded_stop = self._loaded_stop, None
        if loaded is not None:
            stop_at, stop_step = loaded
            # 1 is a step, 1.0 the whole run.
            if (stop_at, isinstance(stop_at, int)) == (self.schedule.stop_at, isinstance(self.schedule.stop_at, int)):
                return stop_step
            log.warning(
                "distillation: stop_at is %s now, and was %s (step %d) in the checkpoint; the new value counts",
                self.schedule.stop_at,
                stop_at,
                stop_step,
            )
        return self.schedule.stop_step(total_steps)

    def _load(self, student: nn.Module) -> nn.Module:
        if isinstance(self._source, nn.Module):
            return self._source
        if self._source is None:
            raise ConfigError(
                "the teacher was freed at the stop of an earlier run; give teacher as a directory, a Hub id or a "
                "function that loads it, or make a new callback"
            )
        if isinstance(self._source, str | Path):
            return load_teacher(self._source, student)
        teacher = self._source()
        if not isinstance(teacher, nn.Module):
            raise ConfigError(f"the function given as teacher returned a {type(teacher).__name__}; expected a model")
        return teacher
