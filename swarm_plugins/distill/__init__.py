"""Mixture-of-Students: a shallower copy of a model, and its distillation, which stops at a step.

The method of DeepSpeed-MoE (Rajbhandari et al. 2022), section 4.2.

```text
students.py       make_student: copies the layers that are kept
config_cut.py     which layers those are, and the config that goes with them
loss.py           distillation_loss: KL divergence of the token distributions, in pieces
schedule.py       Schedule: the weight of the term at each step
term.py           adds the term to the loss of a student's training forward
pair.py           loads a teacher and checks that it fits the student
distillation.py   Distillation: all of it, for a training loop; what the callbacks are made of
```

Knows torch and transformers, but no Trainer: see `swarm_plugins.StagedDistillation` for Lightning and
`swarm_plugins.StagedDistillationTrainerCallback` for transformers.
"""

from __future__ import annotations

from swarm_plugins.distill.distillation import Distillation
from swarm_plugins.distill.loss import distillation_loss
from swarm_plugins.distill.students import make_student

__all__ = ["Distillation", "distillation_loss", "make_student"]
