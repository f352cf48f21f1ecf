"""Finds out by running a model what a span has to know of it."""
