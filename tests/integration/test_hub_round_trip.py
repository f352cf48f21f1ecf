"""From training against a base on the Hub to loading the published adapter: by names and commits, as users do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from swarm_plugins import AutoSwarmModelForCausalLM, find_adapters, load_adapter
from swarm_plugins.backbone import base_version
from swarm_plugins.callbacks.publishing import Publishing
from swarm_plugins.checkpoint import Checkpoint, block_fingerprints
from swarm_plugins.hub import Manifest
from swarm_plugins.local_hub import LocalHub
from swarm_plugins.testing.in_process import InProcessSwarm
from swarm_plugins.testing.models import save_tiny

SCRIPT = """
import warnings; warnings.simplefilter("ignore")
import json, sys
from pathlib import Path
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from swarm_plugins import find_adapters, load_adapter
from swarm_plugins.callbacks.publishing import Publishing
from swarm_plugins.errors import ConfigError
from swarm_plugins.merging import merge_adapter

old, new = sys.argv[1:]
base = AutoModelForCausalLM.from_pretrained("org/base", revision=old)
model = get_peft_model(base, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")).eval()
for name, parameter in model.named_parameters():
    if "lora_B" in name:
        torch.nn.init.normal_(parameter)
publisher = Publishing("me/adapter")
publisher.begin(model, Path("."))
publisher.publish("end", 1, {"val_loss": 1.0})
publisher.finish()
tokens = torch.arange(3, 20)[None]
expected = model(input_ids=tokens).logits

config = json.loads((publisher.pushed[0].folder / "adapter_config.json").read_text())
assert config["base_model_name_or_path"] == "org/base" and config["revision"] == old, config
assert [one.tag for one in find_adapters("org/base", "release-1")] == ["v1"]
assert find_adapters("org/base", "main") == []

same = load_adapter(AutoModelForCausalLM.from_pretrained("org/base", revision="release-1"), "me/adapter")
assert torch.equal(same.eval()(input_ids=tokens).logits, expected)
# PEFT's own loader finds the base's commit by itself.
theirs = AutoPeftModelForCausalLM.from_pretrained("me/adapter", revision="v1")
assert torch.equal(theirs.eval()(input_ids=tokens).logits, expected)
try:
    load_adapter(AutoModelForCausalLM.from_pretrained("org/base"), "me/adapter")
except ConfigError as exc:
    assert f"load the base with revision={old!r}" in str(exc), exc
# Into the base's weights, at the commit that the adapter was trained on.
merged = AutoModelForCausalLM.from_pretrained(merge_adapter("me/adapter@v1", "merged"))
assert torch.allclose(merged.eval()(input_ids=tokens).logits, expected, atol=1e-5)
try:
    merge_adapter("me/adapter", "other", base=f"org/base@{new}")
except ConfigError as exc:
    assert f"was trained on org/base@{old}, the base given is org/base@{new}" in str(exc), exc
    print("refused")
"""


def test_a_base_on_the_hub_and_its_revisions(tmp_path: Path) -> None:
    with LocalHub() as hub:
        old = hub.add("org/base", save_tiny("llama", tmp_path / "one", num_layers=2))
        repo = hub.store.find("org/base")
        assert repo is not None
        hub.store.add_ref(repo, "tags", "release-1", old)
        new = hub.add("org/base", save_tiny("llama", tmp_path / "two", num_layers=2, seed=1))
        keep = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        env = {
            **keep,
            "HF_ENDPOINT": hub.endpoint,
            "HF_TOKEN": "any",
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_DISABLE_XET": "1",
        }
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, old, new], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=200
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("refused")


def test_an_adapter_of_a_model_on_the_swarm_loads_into_the_plain_one(tmp_path: Path) -> None:
    directory = save_tiny("mixtral", tmp_path / "base", num_layers=2)
    tokens = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(0))
    with InProcessSwarm(directory) as swarm, LocalHub() as hub:
        base = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)
        model = get_peft_model(base, LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
        publisher = Publishing("me/adapter", endpoint=hub.endpoint, token="any")
        publisher.begin(model, tmp_path)
        for step in range(2):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            publisher.publish("save", step, {"loss": loss})
        publisher.finish()
        assert [version.tag for version in publisher.pushed] == ["v1", "v2"]
        manifest = Manifest.read(publisher.pushed[-1].folder)
        assert manifest is not None
        assert [(span.start, span.end, span.quantization) for span in manifest.spans] == [
            (0, 1, "none"),
            (1, 2, "none"),
        ]
        assert manifest.block_fingerprints == block_fingerprints(Checkpoint.open(directory), "model.layers")
        assert len(manifest.block_fingerprints) == 2
        with torch.no_grad():
            expected = model(input_ids=tokens).logits
        plain = AutoModelForCausalLM.from_pretrained(directory)
        version = base_version(plain)
        assert version is not None
        assert [one.tag for one in find_adapters(version, endpoint=hub.endpoint)] == ["v2"]
        loaded = load_adapter(plain, "me/adapter", endpoint=hub.endpoint, cache_dir=tmp_path / "cache").eval()
        with torch.no_grad():
            # The span's own kernels may sum in another order: float32 rounding, no more.
            torch.testing.assert_close(loaded(input_ids=tokens).logits, expected, rtol=1e-5, atol=1e-5)
        fresh = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)
        remote = load_adapter(fresh, "me/adapter", endpoint=hub.endpoint, cache_dir=tmp_path / "cache").eval()
        with torch.no_grad():
            torch.testing.assert_close(remote(input_ids=tokens).logits, expected, rtol=1e-6, atol=1e-6)
