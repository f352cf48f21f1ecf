"""Goes on with a study from its record: what ran on another machine is not run again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from swarm_plugins.errors import ConfigError
from recipes.study.arms import Plan
from recipes.study.training import Place


def read(file: Path, plan: Plan, corpus: str) -> dict[str, Any]:
    """Returns the figures of a record.

    Args:
        file: ``prmoe-study.json`` of an earlier report.
        plan: The study that goes on.
        corpus: Digest of its text.

    Raises:
        ConfigError: If the file is not a record, or its plan or text differs, so that losses cannot be compared.
    """
    try:
        figures: dict[str, Any] = json.loads(file.read_text())
        recorded = {**_settings(figures["plan"]), "text": figures["corpus"]["digest"]}
        for entry in figures["arms"].values():
            if any(entry[name].keys() != entry["losses"].keys() for name in ("curves", "cpu_s")):
                raise ValueError("an arm has other seeds in its curves")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"--record {file} is not a study's record ({error!r}): give a prmoe-study.json") from error
    wanted = {**_settings(json.loads(json.dumps(asdict(plan)))), "text": corpus}
    differ = [name for name, value in wanted.items() if recorded.get(name) != value]
    if differ:
        found, asked = (", ".join(f"{name}={some.get(name)}" for name in differ) for some in (recorded, wanted))
        raise ConfigError(f"--record {file} has {found}, but this study has {asked}: losses cannot be compared")
    return figures


def _settings(plan: Mapping[str, Any]) -> dict[str, Any]:
    return {**plan["training"], **{name: value for name, value in plan.items() if name != "training"}}


def adopt(figures: Mapping[str, Any], plan: Plan, place: Place) -> int:
    """Takes the runs of a record as finished, without their models, and returns how many it had not known.

    Args:
        figures: What `read` returned.
        plan: The study that goes on.
        place: Where its runs are.
    """
    adopted = 0
    for arm, entry in figures["arms"].items():
        for seed, loss in entry["losses"].items():
            run = plan.runs(int(seed), figures["corpus"]["digest"])[arm]
            if place.result(run) is None:
                record = {"run": run.as_dict(), "loss": loss, "curve": entry["curves"][seed]}
                record |= {"cpu_s": entry["cpu_s"][seed]}
                record |= {name: entry[name] for name in ("parameters", "tokens", "versions")}
                record |= {"machine": figures["machine"]} if "machine" in figures else {}
                place.keep(run, record)
                adopted += 1
    return adopted
