"""A mixture in 4 bits whose experts are offloaded, beside llama.cpp with the same weights."""
