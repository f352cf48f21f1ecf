"""Losses of a model whose blocks are in few bits, in the formats that checkpoints are published in and in our own."""
