"""The models that are compared, and the claims of the paper about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from swarm_plugins.errors import ConfigError
from recipes.study.settings import Run, Shape, Teaching, Training


@dataclass(frozen=True)
class Claim:
    """A statement about the held-out losses of two arms.

    Args:
        name: Short, for tables and pictures.
        better: Arm that has the lower loss according to the paper.
        other: The arm it is compared with.
        source: Section of the paper.
        baseline: None: ``better`` must be better than ``other``. Otherwise it need not be better, but must keep at
            least half of what ``other`` gains over this third arm, and be better than it. A gain fixes the scale of
            "as good as": a margin in nats could be wider than all differences between the arms.
    """

    name: str
    better: str
    other: str
    source: str
    baseline: str | None = None

    def difference(self, losses: Mapping[str, float]) -> float:
        """Returns the loss of the other arm minus the loss of the better one, in one seed."""
        return losses[self.other] - losses[self.better]

    def evidence(self, losses: Mapping[str, float]) -> float:
        """Returns what must be positive for the claim to hold in one seed."""
        if self.baseline is None:
            return self.difference(losses)
        # Where the other arm has gained nothing, half of it would be a licence to be worse than the baseline.
        halfway = (losses[self.other] + losses[self.baseline]) / 2
        return min(halfway, losses[self.baseline]) - losses[self.better]

    @property
    def arms(self) -> tuple[str, ...]:
        """Arms whose losses it needs."""
        return (self.better, self.other) if self.baseline is None else (self.better, self.other, self.baseline)


CLAIMS = (
    Claim("MoE beats dense", "standard", "dense", "3"),
    Claim("experts in the second half beat the first half", "second-half", "first-half", "4.1.1"),
    Claim("top-2 beats top-1", "top-2", "top-1", "4.1.1"),
    Claim("residual top-1 beats top-1", "residual", "top-1", "4.1.1"),
    Claim("residual top-1 keeps half of top-2's gain over top-1", "residual", "top-2", "4.1.1", "top-1"),
    Claim("PR-MoE beats dense", "pr-moe", "dense", "4.1"),
    Claim("PR-MoE keeps half of standard MoE's gain over dense", "pr-moe", "standard", "4.1", "dense"),
    Claim("staged distillation beats none", "student-staged", "student", "4.2"),
    Claim("staged distillation beats full", "student-staged", "student-full", "4.2"),
    Claim("staged student closes half of the gap to its teacher", "student-staged", "pr-moe", "4.2", "student"),
    Claim("32 experts beat 8", "standard", "top-1", "3"),
    Claim("MoE beats dense of 1.25 times the width", "standard", "dense-1.25x", "3"),
    Claim("MoE keeps half of the gain of dense with 4 times the compute", "standard", "dense-2x", "3", "dense"),
    Claim("no distillation beats full distillation at the end", "student", "student-full", "4.2"),
    Claim("PR-MoE beats the pyramid alone", "pr-moe", "pyramid", "4.1.4"),
    Claim("staged distillation beats none with all of its compute", "student-staged", "student-long", "4.2"),
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Scale of a study.

    Args:
        training: The same for all arms.
        vocab_size: Tokens of the BPE.
        width: Hidden size; the three larger dense models have more.
        experts: Experts of a layer of the simple comparisons; PR-MoE has half of them, then as many.
        standard_experts: Experts of a layer of the standard MoE.
        staged_until: Share of the steps that the staged student has its teacher.
        long_times: Steps of a student without a teacher in those of the others, so that it takes the processor time
            of the staged student and of its teacher's training together.

    Raises:
        ConfigError: If a width cannot be divided into heads.
    """

    training: Training
    vocab_size: int = 1024
    width: int = 96
    experts: int = 8
    standard_experts: int = 32
    staged_until: float = 0.6
    long_times: float = 2.7

    def __post_init__(self) -> None:
        odd = [shape.width for shape in self.shapes().values() if shape.width % (2 * shape.heads)]
        if odd:
            raise ConfigError(
                f"width {self.width} makes a model of width {odd[0]}, which cannot be divided into heads of an even "
                "width: use a multiple of 96"
            )

    def shapes(self) -> Mapping[str, Shape]:
        """Returns the models by arm, students apart."""
        few, many = self.experts // 2, self.experts
        return {
            "dense": self._shape((0, 0, 0, 0)),
            "first-half": self._shape((many, many, 0, 0)),
            "second-half": self._shape((0, 0, many, many)),
            "top-1": self._shape((0, many, 0, many)),
            "top-2": self._shape((0, many, 0, many), picks=2),
            "residual": self._shape((0, many, 0, many), residual=True),
            "standard": self._shape((0, self.standard_experts, 0, self.standard_experts)),
            "pr-moe": self._shape((0, few, 0, many), residual=True),
            "dense-1.25x": self._shape((0, 0, 0, 0), times=1.25),
            "dense-1.5x": self._shape((0, 0, 0, 0), times=1.5),
            "dense-2x": self._shape((0, 0, 0, 0), times=2.0),
            "pyramid": self._shape((0, few, 0, many)),
        }

    def runs(self, seed: int, corpus: str) -> dict[str, Run]:
        """Returns the runs of a seed by arm, teachers before their students."""
        shapes = self.shapes()
        student = self._shape((0, self.experts // 2, self.experts), residual=True)

        def run(shape: Shape, until: float | None = None) -> Run:
            teaching = None if until is None else Teaching(teacher=shapes["pr-moe"], until=until)
            return Run(
                shape=shape,
                training=self.training,
                seed=seed,
                corpus=corpus,
                vocab_size=self.vocab_size,
                teaching=teaching,
            )

        return {
            **{arm: run(shape) for arm, shape in shapes.items()},
            "student": run(student),
            "student-full": run(student, 1.0),
            "student-staged": run(student, self.staged_until),
            "student-long": replace(run(student), training=self._long()),
        }

    def _long(self) -> Training:
        return replace(self.training, steps=round(self.long_times * self.training.steps))

    def _shape(self, experts: tuple[int, ...], *, residual: bool = False, picks: int = 1, times: float = 1.0) -> Shape:
        width = int(self.width * times)
        return Shape(
            width=width,
            neurons=2 * width,
            heads=max(1, width // 24),
            experts=experts,
            residual="sum" if residual else None,
            picks=picks,
        )
