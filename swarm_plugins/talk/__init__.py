"""Conversations with a model, for `swarm chat` and `swarm run`."""

from __future__ import annotations
