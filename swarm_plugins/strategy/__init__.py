"""Lightning's strategy ``swarm``: blocks run on the swarm; adapters, heads and optimizer stay here.

```text
member.py               peers, device, precision: the same for Trainer and Fabric
inspection.py           checks of a module before training
state.py                checkpoints of the trained tensors, tied to the base model's version
trainer.py fabric.py    the strategies, without the class of Lightning that they extend
unified.py              for lightning.pytorch and lightning.fabric
standalone.py           for pytorch_lightning
standalone_fabric.py    for lightning_fabric
```

The packages duplicate their classes, and each accepts only strategies derived from its own; none is imported before
it is needed.
"""

from __future__ import annotations
