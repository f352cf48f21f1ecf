"""A classifier reads a text alike in every batch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from type_models import save_type

from swarm_plugins.backbone.context import OnThisMachine, active_place
from swarm_plugins.recipes import LabelledData, PromptClassifier

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "bloom"])
@pytest.mark.parametrize("kind", ["LORA", "PROMPT_TUNING", "PREFIX_TUNING"])
def test_a_text_is_read_alike_whatever_its_neighbors(kind: str, model_type: str, tmp_path: Path) -> None:
    data = LabelledData("rows.json", "bytes")
    data.labels = ["a", "b"]
    settings = {"r": 2} if kind == "LORA" else {"num_virtual_tokens": 3}
    tuner = PromptClassifier(str(save_type(model_type, tmp_path)), {"peft_type": kind, **settings})
    trainer: Any = SimpleNamespace(datamodule=data)
    tuner.trainer = trainer
    with active_place(OnThisMachine(offload=None)):
        tuner.configure_model()
    tuner.eval()
    short, long = ([*range(10, 16)], 0), ([*range(20, 36)], 1)
    with torch.no_grad():
        [alone], [among, _] = (tuner(**data._collate(rows)).logits for rows in ([short], [short, long]))
        [unmasked] = tuner(input_ids=torch.tensor([short[0]])).logits
    torch.testing.assert_close(among, alone, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(unmasked, alone, atol=1e-5, rtol=1e-4)
