"""The demonstration on real input: a small mixture-of-experts model, real text, and every step to the Hub and back.

```text
dense_model.py  SmolLM2-135M-Instruct, the dense model that it is made of
text.py         pieces of presidential addresses, documents held out
clusters.py     a router from k-means of hidden states
experts.py      an expert cut out of a dense MLP
upcycling.py    a dense Llama as a Mixtral checkpoint
writing.py      a checkpoint written file by file
model.py        the model of the demonstration: built once, checked, kept
evaluation.py   held-out loss with its standard error
progress.py     a bar at a terminal, plain lines in a file
tuning.py       training with Lightning, on the swarm
tour.py         swarm demo, from the model to the Hub and back
```

Nothing is printed to standard output here: the command line passes in a function that writes.
"""

from __future__ import annotations

from swarm_plugins.demo.dense_model import smollm2

__all__ = ["smollm2"]
