"""llama.cpp beside us, with the same weights."""
