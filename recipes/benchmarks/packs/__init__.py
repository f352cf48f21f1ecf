"""Sessions of a server that decode in one forward, against one after another."""
