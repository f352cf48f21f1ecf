"""Conversation with a model: `swarm chat` and `swarm run` share it."""

from __future__ import annotations
