"""Why peers cannot train together, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from swarm_plugins.errors import ConfigError, ProtocolError, printable
from swarm_plugins.together.signing import Seal
from swarm_plugins.transport.run_messages import RunSpec, RunStatus


class NotAdmittedError(ProtocolError):
    """A peer cannot take part in this run."""

    def __init__(self, kind: Literal["wrong_run", "refused"], message: str) -> None:
        super().__init__(message)
        self.kind: Literal["wrong_run", "refused"] = kind


def check_admitted(run_id: str, seal: Seal, spec: RunSpec, peer: str, status: RunStatus) -> None:
    """Checks that a peer may take part.

    Raises:
        NotAdmittedError: If it may not.
    """
    if status.run != seal.run:
        raise NotAdmittedError("wrong_run", f"this peer takes part in another run, named {run_id!r}")
    if not seal.allows(peer):
        raise NotAdmittedError("refused", f"peer {peer} is not among the allowed peers of run {run_id!r}")
    if not seal.is_proved(peer, status.proof):
        raise NotAdmittedError("refused", f"the secret of run {run_id!r} is another one, or is missing")
    why = difference(spec, status.spec)
    if why is not None:
        raise NotAdmittedError("wrong_run", why)


def difference(ours: RunSpec, theirs: RunSpec) -> str | None:
    """Returns what two peers do not have in common; None if they can train together."""
    if ours.base != theirs.base:
        return _differ("base model", f"{ours.model} ({ours.base})", f"{theirs.model} ({theirs.base})")
    for name, words in (("adapter", "adapter"), ("rules", "rules")):
        if getattr(ours, name) != getattr(theirs, name):
            return _differ(words, getattr(ours, name), getattr(theirs, name))
    if ours.tensors != theirs.tensors:
        return "the run's trained tensors have other names or shapes than yours, or its adapter other settings"
    return None


def _differ(words: str, ours: str, theirs: str) -> str:
    return f"the run's {words}: {printable(ours)}; yours: {printable(theirs)}"


def refused(run_id: str, refusals: Mapping[str, str]) -> ConfigError:
    """Returns the error of a peer that all others refuse."""
    reasons = sorted(set(refusals.values()))
    return ConfigError(
        f"cannot take part in run {run_id!r} ({len(refusals)} peer(s) refuse): {reasons[0]}; train the same base, "
        "adapter and rules with the same secret, or choose another run_id"
    )
