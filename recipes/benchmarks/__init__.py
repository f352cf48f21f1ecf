"""The benchmarks, each a ratio against the same model run locally: ``python -m recipes.benchmarks --help``."""
