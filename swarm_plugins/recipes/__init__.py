"""Lightning modules and data modules for ``swarm fit``, and for your own scripts.

```text
AdapterTuner        language modelling with any PEFT adapter that works on remote blocks
ModelTuner          language modelling with all weights, of a new model or one that exists
StudentTuner        staged distillation of a shallower copy of a teacher
PreferenceTuner     direct preference optimization of an adapter
RewardTuner         group relative policy optimization of an adapter
PromptClassifier    sequence classification with soft prompts and a head
TextData            pieces of running text, documents held out
LabelledData        paragraphs with a class each, documents held out
PairData            pairs of answers, a better and a worse one
PromptData          prompts, with columns for the reward
load_rows           addresses of US presidents, a file, or a data set on the Hub, as a Dataset
split_by_document   such rows, with every eighth document held out
```

A recipe may name other Lightning classes as well. Names are resolved at first use: rows of text need no Lightning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarm_plugins.lazy import LazyNames

if TYPE_CHECKING:
    from swarm_plugins.recipes.classification import PromptClassifier
    from swarm_plugins.recipes.data import LabelledData, TextData
    from swarm_plugins.recipes.language import AdapterTuner
    from swarm_plugins.recipes.models import ModelTuner, StudentTuner
    from swarm_plugins.recipes.preferences import PairData, PreferenceTuner
    from swarm_plugins.recipes.rewards import PromptData, RewardTuner
    from swarm_plugins.recipes.rows import load_rows, split_by_document

__all__ = [
    "AdapterTuner",
    "LabelledData",
    "ModelTuner",
    "PairData",
    "PreferenceTuner",
    "PromptClassifier",
    "PromptData",
    "RewardTuner",
    "StudentTuner",
    "TextData",
    "load_rows",
    "split_by_document",
]

_NAMES = LazyNames(
    __name__,
    {
        "AdapterTuner": ".language",
        "LabelledData": ".data",
        "ModelTuner": ".models",
        "PairData": ".preferences",
        "PreferenceTuner": ".preferences",
        "PromptClassifier": ".classification",
        "PromptData": ".rewards",
        "RewardTuner": ".rewards",
        "StudentTuner": ".models",
        "TextData": ".data",
        "load_rows": ".rows",
        "split_by_document": ".rows",
    },
)
__getattr__, __dir__ = _NAMES.get, _NAMES.list
