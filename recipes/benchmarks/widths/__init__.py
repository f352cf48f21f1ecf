"""Decoding through servers that keep their weights in several widths, beside llama.cpp with the same weights."""
