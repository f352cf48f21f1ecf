"""Recipes, benchmarks and a study: programs to run from a checkout."""
