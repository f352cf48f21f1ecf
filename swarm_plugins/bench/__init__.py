"""The benchmarks that `swarm bench` runs: each a ratio against the same model run locally."""

from __future__ import annotations
