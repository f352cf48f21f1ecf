"""Merged models and adapters as GGUF, for llama.cpp and what is built on it."""
