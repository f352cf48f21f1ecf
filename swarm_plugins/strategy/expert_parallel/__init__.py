"""The strategy ``expert_parallel``: experts are divided over the ranks, and each rank has a batch of its own."""

from __future__ import annotations
