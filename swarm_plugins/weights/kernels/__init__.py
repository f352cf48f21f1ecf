"""How products with a weight are formed: one kernel a module."""
