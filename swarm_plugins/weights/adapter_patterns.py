"""Expressions in an adapter's config, replaced by the names that they match before PEFT searches with them.

PEFT uses Python's ``re``, which a hostile expression of eight characters keeps busy for years.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from swarm_plugins.errors import UnsupportedError
from swarm_plugins.model_names import is_plain_module as is_plain
from swarm_plugins.weights.published.targets import Target

_WHOLE = ("target_modules", "exclude_modules", "feedforward_modules")
"""Settings that are an expression if they are one string."""
_ALL_LINEAR = "all-linear"
_PARTS = ("modules_to_save", "layers_pattern")
"""Settings of which PEFT makes parts of an expression."""
_OVERRIDES = ("rank_pattern", "alpha_pattern")
"""Settings whose keys are expressions for the end of a name."""
_MAX_NAMES = 1 << 14
_MAX_PATTERNS = 1 << 11
_FEW_PATTERNS = 1 << 7
"""PEFT tries every key on every module, and compiles it each time if ``re`` does not remember so many."""
_MAX_WORK = 1 << 23
"""Steps that the expressions of a setting may take together: some seconds."""


def replace_expressions(config: Any, label: str, model: nn.Module) -> None:
    """Replaces the expressions in an adapter's config by the names in a model that they match.

    Args:
        config: PEFT's.
        label: What errors call the adapter.
        model: The model that it is for, as PEFT searches it.

    Raises:
        UnsupportedError: If an expression is not one that can be matched in bounded time, or there are too many names.
    """
    modules = [name for name, _ in model.named_modules() if name]
    for name in _WHOLE:
        value = getattr(config, name, None)
        if isinstance(value, str) and value != _ALL_LINEAR and not is_plain(value):
            found = _matched(value, modules, f"{name} of {label}")
            if not found and name == "target_modules":
                raise UnsupportedError(f"{name} of {label} is {value!r}, which matches no module of the model")
            setattr(config, name, found)
        elif value is not None and len(value) > _MAX_NAMES:
            raise UnsupportedError(f"{label} has {len(value)} names as {name}, at most {_MAX_NAMES} are read")
    for name in _PARTS:
        _check_plain(getattr(config, name, None), f"{name} of {label}")
    for name, value in vars(config).items():
        if not name.endswith("_pattern") or name in _PARTS or not value:
            continue
        if name in _OVERRIDES:
            names = modules + [one for one, _ in model.named_parameters()]
            setattr(config, name, _overridden(value, names, f"{name} of {label}"))
        _check_plain(getattr(config, name), f"{name} of {label}")


def _matched(pattern: str, names: Sequence[str], what: str) -> set[str]:
    target = _target(f"({pattern})$", what)
    return {name for name in names if target.matches(name)}


def _overridden(values: dict[str, Any], names: Sequence[str], what: str) -> dict[str, Any]:
    """Returns the values by names, each with that of the first expression which its end matches; few names stay."""
    _check_count(values, what)
    if all(map(is_plain, values)):
        return values if len(values) <= _FEW_PATTERNS else _named(values, names)
    found: dict[str, Any] = {}
    work = 0
    # One after the other: an automaton can take megabytes.
    for pattern, value in values.items():
        matched, steps = _ends(pattern, [name for name in names if name not in found], what)
        found.update(dict.fromkeys(matched, value))
        work += steps
        if work > _MAX_WORK:
            raise UnsupportedError(
                f"{what} has {len(values)} entries, whose expressions together take more than {_MAX_WORK} steps to "
                "match: name the modules instead"
            )
    return {name: found[name] for name in names if found.get(name) is not None}


def _ends(pattern: str, names: Sequence[str], what: str) -> tuple[list[str], int]:
    """Returns the names whose end matches, and the steps that took; an expression that is a plain name takes none."""
    literal = pattern.removesuffix("$").replace(r"\.", ".")
    if is_plain(literal.removeprefix("^")):
        return [name for name in names if literal in (name, f"^{name}") or name.endswith(f".{literal}")], 0
    target = _target(rf"(.*\.)?({pattern})$", what)
    return [name for name in names if target.matches(name)], target.work


def _named(values: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    order = {key: number for number, key in enumerate(values)}
    found: dict[str, Any] = {}
    for name in names:
        parts = name.split(".")
        ends = (".".join(parts[number:]) for number in range(len(parts)))
        if known := [end for end in ends if end in order]:
            found[name] = values[min(known, key=order.__getitem__)]
    return found


def _target(pattern: str, what: str) -> Target:
    try:
        return Target(pattern)
    except UnsupportedError as exc:
        raise UnsupportedError(f"{what}: {exc}; name the modules instead") from exc


def _check_plain(values: Any, what: str) -> None:
    values = [values] if isinstance(values, str) else list(values or ())
    _check_count(values, what)
    for one in values:
        if not is_plain(one):
            raise UnsupportedError(f"{what} has the expression {str(one)[:80]!r}: name the modules instead")


def _check_count(values: Any, what: str) -> None:
    if len(values) > _MAX_PATTERNS:
        raise UnsupportedError(f"{what} has {len(values)} entries, at most {_MAX_PATTERNS} are read")
