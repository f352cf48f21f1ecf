"""The modules and data that the recipes name: what ``swarm fit`` trains, and on what.

```text
AdapterTuner        language modelling with any PEFT adapter that works on remote blocks
PromptClassifier    sequence classification with soft prompts and a head
TextData            pieces of running text, documents held out
LabelledData        paragraphs with a class each, documents held out
```

They are ordinary Lightning classes: a recipe may name others, and a script may use these.
"""

from __future__ import annotations

from swarm_plugins.recipes.classification import PromptClassifier
from swarm_plugins.recipes.data import LabelledData, TextData
from swarm_plugins.recipes.language import AdapterTuner

__all__ = ["AdapterTuner", "LabelledData", "PromptClassifier", "TextData"]
