"""The demonstration on real input: a real small mixture-of-experts model, real text, and the whole way to the Hub.

```text
text.py         pieces of presidential addresses, documents held out
clusters.py     a router from k-means of hidden states
experts.py      an expert cut out of a dense MLP
upcycling.py    a dense Llama as a Mixtral checkpoint
model.py        the model of the demonstration: built once, checked, kept
evaluation.py   held-out loss with its standard error
tuning.py       Lightning, on the swarm
tour.py         swarm demo, from the model to the Hub and back
dense_model.py  SmolLM2-135M-Instruct, the dense model that it is made of
```

Nothing is printed here: the command line hands in where to write to.
"""

from __future__ import annotations

from swarm_plugins.demo.dense_model import smollm2

__all__ = ["smollm2"]
