"""Lightning's strategy ``swarm``: blocks run on the swarm, what is trained stays here.

```text
member.py               peers, device, precision: the same for Trainer and Fabric
inspection.py           what a module must have to be trained this way
state.py                checkpoints of what is trained, tied to the base model's version
trainer.py fabric.py    the strategies, without the class of Lightning that they extend
unified.py              for lightning.pytorch and lightning.fabric
standalone.py           for pytorch_lightning
standalone_fabric.py    for lightning_fabric
```

The packages have two hierarchies of the same classes, and each accepts strategies of its own only; none is imported
before it is asked for.
"""

from __future__ import annotations
