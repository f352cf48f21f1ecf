"""How the bytes of a weight lie in a file: one format a module."""
