"""Which experts are in memory, within budgets in bytes."""
