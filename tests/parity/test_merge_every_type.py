"""Every type of transformers: a folder that `merge_adapter` writes holds what PEFT merges, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from type_models import TOWERLESS, TYPES, UNBUILT, matrix, save_type

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.checkpoint.outline import meta_model
from swarm_plugins.errors import SwarmError
from swarm_plugins.merging import merge_adapter

pytestmark = pytest.mark.filterwarnings("ignore")
EXPERTS = {"gate_up_proj", "up_proj", "down_proj"}
# Which PEFT refuses on Mamba.
EXCLUDED = r".*\.(out_proj|conv1d)"
REFUSED = {
    # One block at several places, with a LoRA at each.
    "zamba": "are one weight in",
    "zamba2": "are one weight in",
    # PEFT renames the modules of shared experts and of short convolutions when it loads what it has saved.
    "laguna": "lacks 18 tensors that its config asks for",
    "inkling2_text": "lacks 8 tensors that its config asks for",
}


@pytest.mark.parametrize("model_type", matrix(set(TYPES) - {*UNBUILT, *TOWERLESS}, every=3))
def test_a_merged_folder_is_what_peft_merges(tmp_path: Path, model_type: str) -> None:
    (tmp_path / "base").mkdir()
    base, adapter = save_type(model_type, tmp_path / "base"), tmp_path / "adapter"
    model_class = type(meta_model(Checkpoint.open(base).config, torch.float32))
    model = model_class.from_pretrained(base)
    names = {own for module in model.modules() for own, one in module.named_parameters(recurse=False) if one.ndim == 3}
    config = LoraConfig(
        r=2,
        target_modules="all-linear",
        exclude_modules=EXCLUDED,
        target_parameters=sorted(names & EXPERTS) or None,
        init_lora_weights=False,
    )
    torch.manual_seed(0)
    get_peft_model(model, config).save_pretrained(adapter)
    if model_type in REFUSED:
        with pytest.raises(SwarmError, match=REFUSED[model_type]):
            merge_adapter(adapter, tmp_path / "out", base=base)
        return
    out = merge_adapter(adapter, tmp_path / "out", base=base)
    wanted = PeftModel.from_pretrained(model_class.from_pretrained(base), adapter).merge_and_unload().state_dict()
    found, before = (model_class.from_pretrained(one).state_dict() for one in (out, base))
    assert found.keys() == wanted.keys()
    assert [name for name in found if not torch.equal(found[name], wanted[name])] == []
    assert any(not torch.equal(found[name], before[name]) for name in found)
    assert set(Checkpoint.open(out).tensors) == set(Checkpoint.open(base).tensors)
