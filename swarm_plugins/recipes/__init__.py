"""Lightning modules and data modules for ``swarm fit``, and for your own scripts.

```text
AdapterTuner        language modelling with any PEFT adapter that works on remote blocks
ModelTuner          language modelling with all weights, of a new model or one that exists
StudentTuner        staged distillation of a shallower copy of a teacher
PromptClassifier    sequence classification with soft prompts and a head
TextData            pieces of running text, documents held out
LabelledData        paragraphs with a class each, documents held out
```

A recipe may name other Lightning classes as well. Names are resolved at first use: rows of text need no Lightning.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from swarm_plugins.errors import naming_extras

if TYPE_CHECKING:
    from swarm_plugins.recipes.classification import PromptClassifier
    from swarm_plugins.recipes.data import LabelledData, TextData
    from swarm_plugins.recipes.language import AdapterTuner
    from swarm_plugins.recipes.models import ModelTuner, StudentTuner

__all__ = ["AdapterTuner", "LabelledData", "ModelTuner", "PromptClassifier", "StudentTuner", "TextData"]

_HOMES = {
    "AdapterTuner": "language",
    "LabelledData": "data",
    "ModelTuner": "models",
    "PromptClassifier": "classification",
    "StudentTuner": "models",
    "TextData": "data",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with naming_extras():
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
