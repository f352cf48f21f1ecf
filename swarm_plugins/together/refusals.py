"""Why peers cannot train together, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from swarm_plugins.errors import ConfigError, ProtocolError, printable
from swarm_plugins.transport.run_messages import RunSpec


class NotAdmittedError(ProtocolError):
    """A peer cannot take part in this run."""

    def __init__(self, kind: Literal["wrong_run", "refused"], message: str) -> None:
        super().__init__(message)
        self.kind: Literal["wrong_run", "refused"] = kind


def difference(ours: RunSpec, theirs: RunSpec) -> str:
    """Returns what two peers do not have in common."""
    named = (("base", "base model"), ("adapter", "adapter"), ("rules", "rules"), ("tensors", "trained tensors"))
    for name, words in named:
        mine, its = getattr(ours, name), getattr(theirs, name)
        if mine != its and isinstance(mine, str):
            return f"its {words} is {printable(mine)}, not {printable(its)}"
        if mine != its:
            return f"its {words} have other names or shapes"
    return "nothing"


def refused(run_id: str, refusals: Mapping[str, str]) -> ConfigError:
    """Returns the error of a peer that all others refuse."""
    reasons = sorted(set(refusals.values()))
    return ConfigError(
        f"cannot take part in run {run_id!r}: {reasons[0]} (says {'each' if len(reasons) == 1 else 'one'} of "
        f"{len(refusals)} peer(s)); train the same base, adapter and rules with the same secret, or choose another "
        "run_id"
    )
