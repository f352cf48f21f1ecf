"""Spot checks of servers' answers, and the quarantine of those caught with a wrong one."""

from __future__ import annotations

from swarm_plugins.verification.quarantine import Quarantine, user_quarantine
from swarm_plugins.verification.verifier import Verifier, make_guard

__all__ = ["Quarantine", "Verifier", "make_guard", "user_quarantine"]
