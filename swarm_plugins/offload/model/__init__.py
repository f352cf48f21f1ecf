"""A Hugging Face model whose experts are borrowed from the cache."""

from __future__ import annotations
