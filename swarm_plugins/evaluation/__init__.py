"""Evaluates the versions of an adapter with lm_eval, for benchmarks that live with it. Extra: ``eval``.

```text
tasks.py       settings; reads task files: digest, data, no code
scoring.py     lm_eval's tasks on a loaded model
versions.py    the tagged versions, and the base of each
evaluating.py  what is missing, kept on disk as soon as it is there; results, card and plot of all
plot.py        metrics over versions
```

`hub` has the records and the card. The idea is section 2.3 of Petals (Borzunov et al. 2022).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarm_plugins.lazy import LazyNames

if TYPE_CHECKING:
    from swarm_plugins.evaluation.evaluating import EvalJob, Evaluated, evaluate_versions
    from swarm_plugins.evaluation.tasks import EvalSettings
    from swarm_plugins.evaluation.versions import TaggedVersion

__all__ = ["EvalJob", "EvalSettings", "Evaluated", "TaggedVersion", "evaluate_versions"]

_NAMES = LazyNames(
    __name__,
    {
        "EvalJob": ".evaluating",
        "EvalSettings": ".tasks",
        "Evaluated": ".evaluating",
        "TaggedVersion": ".versions",
        "evaluate_versions": ".evaluating",
    },
)
__getattr__, __dir__ = _NAMES.get, _NAMES.list
