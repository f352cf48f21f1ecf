"""Decoding through servers with weights in several widths, against llama.cpp with the same weights."""
