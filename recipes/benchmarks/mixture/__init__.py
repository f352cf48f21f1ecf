"""An offloaded mixture in 4 bits against llama.cpp with the same weights."""
