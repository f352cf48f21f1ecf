"""Imported once, before the ranks are forked."""

from __future__ import annotations

import swarm_plugins.parallel
import swarm_plugins.testing

MODULES = (swarm_plugins.parallel, swarm_plugins.testing)
