"""A study from its plan to its report: what ``python -m recipes.study`` runs."""

from __future__ import annotations

import json
import logging
import os
import platform
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from swarm_plugins.errors import ConfigError
from recipes.study import cost, record, words
from recipes.study.arms import CLAIMS, Plan
from recipes.study.corpus import load_corpus
from recipes.study.plots import draw
from recipes.study.report import as_markdown, collect, outcomes
from recipes.study.runner import run_all
from recipes.study.settings import Run
from recipes.study.training import Place

log = logging.getLogger(__name__)

FIGURES = "prmoe-study.json"
REPORT = "report.md"


class Study:
    """Trains, measures and reports the arms of a plan.

    Args:
        plan: Scale of the study.
        folder: Keeps runs, text and measurements; give the same one to go on.
        seeds: One run of every arm for each.
        device: ``cpu`` or ``cuda``.
        arms: What is trained and reported, teachers included. None: all arms.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        folder: Path,
        seeds: Sequence[int],
        device: str = "cpu",
        arms: Collection[str] | None = None,
    ) -> None:
        self.plan = plan
        self.place = Place(folder.resolve(), device)
        self.seeds = seeds
        self.arms = arms

    def train(self, *, jobs: int) -> None:
        """Trains every run that has not finished.

        Raises:
            ConfigError: If no seed is given, or the device or an arm is unknown.
        """
        if not self.seeds:
            raise ConfigError("a study needs at least 1 seed, and 3 to show anything")
        if self.place.device.startswith("cuda") and not torch.cuda.is_available():
            raise ConfigError(f"--device {self.place.device}: this torch sees no CUDA device; use --device cpu")
        digest = self._corpus().facts.digest
        arms = {run.key: (arm, seed) for seed in self.seeds for arm, run in self.plan.runs(seed, digest).items()}
        runs = [self.plan.runs(seed, digest)[arm] for seed, arm in self._order()]
        for run in runs:
            if run.teacher is not None and self.place.result(run) is None and not self.place.has_model(run.teacher):
                self.place.forget(run.teacher)  # a record tells of it, and has no model
        num_finished = sum(self.place.result(run) is not None for run in runs)
        log.info("%d runs, %d finished", len(runs), num_finished)

        def tell(run: Run, found: dict[str, Any]) -> None:
            arm, seed = arms[run.key]
            log.info("%s, seed %d: %.4f nats/byte in %.0f CPU seconds", arm, seed, found["loss"], found["cpu_s"])

        run_all(runs, self.place, jobs=jobs, on_end=tell)

    def go_on_from(self, file: Path) -> None:
        """Takes the runs and last words of a record as found; their models are not there.

        Raises:
            ConfigError: If the file is not a record, or belongs to another plan or text.
        """
        figures = record.read(file, self.plan, self._corpus().facts.digest)
        log.info("%s: %d runs", file, record.adopt(figures, self.plan, self.place))
        if "words" in figures:
            self._keep_words(figures["words"])

    def _order(self) -> list[tuple[int, str]]:
        """Returns seed and arm of all runs: the first seed whole, then all seeds of the arms that claims are about.

        A study that is cut short then has many claims with all seeds, rather than all claims with few.
        """
        arms = self._known_arms()
        claimed = {arm for claim in CLAIMS for arm in claim.arms}
        # Students last, because teachers cost time; one of the larger dense models is in no claim.
        ranks = {arm: 3 if arm not in claimed else 2 if arm.startswith("student") else 1 for arm in arms}
        pairs = [(seed, arm) for seed in self.seeds for arm in arms if self.arms is None or arm in self.arms]
        return sorted(pairs, key=lambda pair: 0 if pair[0] == self.seeds[0] else ranks[pair[1]])

    def _known_arms(self) -> list[str]:
        known = [*self.plan.runs(0, "")]
        if unknown := set(self.arms or ()).difference(known):
            raise ConfigError(f"unknown --arms {', '.join(sorted(unknown))}; known: {', '.join(known)}")
        return known

    def measure_cost(self, *, rounds: int = 25, tokens: int = 48, rows: int = 32) -> None:
        """Measures latency and throughput of the first seed's models; best on a quiet machine."""
        how: dict[str, float] = {"rounds": rounds, "prompt_tokens": cost.PROMPT_TOKENS, "tokens": tokens, "rows": rows}
        load = os.getloadavg()[0]
        found = cost.measure(
            self.plan, self.seeds[0], self._corpus(), self.place, rounds=rounds, tokens=tokens, rows=rows
        )
        how |= {"load_before": load, "load_after": os.getloadavg()[0]}
        self._file("cost").write_text(json.dumps({"how": how, "arms": found}, indent=1))
        log.info("measured %s", ", ".join(found) or "nothing: no model has been trained")

    def measure_words(self) -> None:
        """Measures how many last words the models name that were trained here."""
        found = words.measure(self.plan, self.seeds, self._corpus(), self.place)
        self._keep_words(found)
        log.info(
            "asked %s for the last words of %d passages", ", ".join(found["arms"]) or "no model", found["passages"]
        )

    def _keep_words(self, found: dict[str, Any]) -> None:
        file = self._file("words")
        known = json.loads(file.read_text()) if file.exists() else found
        file.write_text(json.dumps(words.joined(known, found), indent=1))

    def report(self, output: Path) -> dict[str, Any]:
        """Writes figures, tables and pictures of the runs that have finished, and returns the figures.

        Raises:
            ConfigError: If an arm is unknown.
        """
        self._known_arms()
        figures = collect(self.plan, self.seeds, self._corpus().facts, self.place, self.arms)
        figures["machine"] = self._machines()
        if self._file("words").exists():
            words.add_words(figures, json.loads(self._file("words").read_text()))
        if self._file("cost").exists():
            found = json.loads(self._file("cost").read_text())
            cost.add_cost(figures, found["arms"], found["how"])
        output.mkdir(parents=True, exist_ok=True)
        (output / FIGURES).write_text(json.dumps(figures, indent=1) + "\n")
        (output / REPORT).write_text(as_markdown(figures))
        pictures = draw(figures, output)
        for one in outcomes(figures):
            log.info("%s: %s", one.claim.name, one.verdict)
        log.info("wrote %s", ", ".join(str(file) for file in (output / FIGURES, output / REPORT, *pictures)))
        return figures

    def _machines(self) -> str:
        """Returns the machines that trained the runs of the report."""
        digest, here = self._corpus().facts.digest, _machine(self.place.device)
        runs = (run for seed in self.seeds for run in self.plan.runs(seed, digest).values())
        found = (self.place.result(run) for run in runs)
        return "; ".join(dict.fromkeys(one.get("machine", here) for one in found if one is not None)) or here

    def _corpus(self) -> Any:
        return load_corpus(self.place.folder / "corpus", self.plan.vocab_size)

    def _file(self, what: str) -> Path:
        # Models of other settings have other costs.
        run = self.plan.runs(self.seeds[0], "")["dense"]
        return self.place.folder / f"{what}-{run.key}-{self.place.device}.json"


def _machine(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    names = [line for line in _cpu_info() if line.startswith("model name")]
    name = names[0].partition(":")[2].strip() if names else platform.machine()
    return f"{name}, {os.cpu_count()} cores, torch {torch.__version__}"


def _cpu_info() -> list[str]:
    file = Path("/proc/cpuinfo")
    return file.read_text().splitlines() if file.exists() else []
