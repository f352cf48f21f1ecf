"""Speculative decoding for models far away: several drafted tokens are verified in one trip.

`Speculation` goes to `generate(custom_generate=...)`. It drafts with a small model or from the text itself, and chooses
how much to draft from the times and the acceptance that it measures.
"""

from __future__ import annotations

from swarm_plugins.speculation.pace import Counts
from swarm_plugins.speculation.speculation import Speculation

__all__ = ["Counts", "Speculation"]
