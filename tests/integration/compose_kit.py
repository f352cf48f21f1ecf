"""compose.yaml as compose reads it: with its variables filled in."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent.parent
COMPOSE = ROOT / "compose.yaml"
VARIABLE = re.compile(r"\$\{(\w+)(?:(:?-)([^}]*)|:\?[^}]+)?\}")


def loaded(**environment: str) -> dict[str, Any]:
    """Returns compose.yaml; fails on a variable that has neither a value nor a default."""

    def value(match: re.Match[str]) -> str:
        name, sign, default = match.groups()
        if environment.get(name) or (sign == "-" and name in environment):
            return environment[name]
        assert sign, f"{name} has no value"
        return str(default)

    def filled(node: Any) -> Any:
        if isinstance(node, dict):
            return {name: filled(one) for name, one in node.items()}
        if isinstance(node, list):
            return [filled(one) for one in node]
        return VARIABLE.sub(value, node) if isinstance(node, str) else node

    found: dict[str, Any] = filled(yaml.safe_load(COMPOSE.read_text()))
    return found


def swarm_services(file: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the services whose image runs `swarm`."""
    return {name: one for name, one in file["services"].items() if one["image"] == "swarm_plugins"}
