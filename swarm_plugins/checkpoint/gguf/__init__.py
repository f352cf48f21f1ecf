"""Checkpoints in a GGUF file: read in parts under the names that transformers has for their tensors."""
