"""The demonstration on real input: a small mixture-of-experts model, real text, and every step to the Hub and back.

`tour.py` runs it; `model.py` makes the model, from `dense_model.py` by way of `upcycling.py`. Nothing here prints to
standard output: the command line passes in a function that writes.
"""

from __future__ import annotations

from swarm_plugins.demo.dense_model import smollm2

__all__ = ["smollm2"]
