"""A Hugging Face Hub on this machine, for tests, demos and examples."""

from __future__ import annotations
