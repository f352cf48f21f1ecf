"""Lightning's strategies, a room for each: ``swarm`` and ``expert_parallel``.

```text
member.py               options and checks: the same for Trainer and Fabric
state.py                checkpoints
trainer.py fabric.py    the strategies, without the class of Lightning that they extend
unified.py              for lightning.pytorch and lightning.fabric
standalone.py           for pytorch_lightning
standalone_fabric.py    for lightning_fabric
```

The packages duplicate their classes, and each accepts only strategies derived from its own; none is imported before
it is needed.
"""

from __future__ import annotations
