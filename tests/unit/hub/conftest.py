"""A local Hub with two users, and folders of adapters to push to it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from swarm_plugins.hub import AdapterFacts, Manifest, PushTarget, card_text
from swarm_plugins.local_hub import LocalHub

BASE, SHA = "org/base", "a" * 40


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    with LocalHub(tokens={"token-of-alice": "alice", "token-of-bob": "bob"}) as running:
        yield running


@pytest.fixture
def target(hub: LocalHub) -> PushTarget:
    return PushTarget(repo_id="alice/adapter", endpoint=hub.endpoint)


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes an adapter whose tensors differ by `seed`."""

    def make(seed: int = 0, *, base: str = BASE, revision: str = SHA, manifest: bool = True) -> Path:
        folder = tmp_path / f"adapter-{seed}"
        folder.mkdir()
        config = {"peft_type": "LORA", "base_model_name_or_path": base, "revision": revision}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        save_file({"weight": torch.full((4, 4), float(seed))}, folder / "adapter_model.safetensors")
        if manifest:
            known = Manifest(base_name=base, base_revision=revision, peft_type="LORA", metrics={"val_loss": 2.0 - seed})
            known.write(folder)
            base_model = None if revision.startswith("local-") else base
            (folder / "README.md").write_text(card_text(AdapterFacts(repo_id="x/y", base_model=base_model), known))
        return folder

    return make
