"""Which experts are in memory, within budgets in bytes."""

from __future__ import annotations
