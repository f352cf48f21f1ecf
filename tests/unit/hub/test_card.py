"""The card and swarm.json."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from swarm_plugins.errors import CheckpointError
from swarm_plugins.hub import AdapterFacts, Manifest, ServedSpan, card_text
from swarm_plugins.hub.manifest import MANIFEST_FILE, PeftFacts

MANIFEST = Manifest(
    base_name="org/base",
    base_revision="a" * 40,
    spans=(ServedSpan(start=0, end=4, dtype="bfloat16", quantization="nf4"),),
    peft_type="LORA",
    event="best",
    step=7,
    metrics={"val_loss": 1.25},
)


def test_the_card_says_what_the_hub_finds_adapters_by() -> None:
    facts = AdapterFacts(repo_id="me/mine", base_model="org/base", tags=("mine",), dataset="org/data")
    card = ModelCard(card_text(facts, MANIFEST))
    data = card.data.to_dict()
    assert data["base_model"] == "org/base"
    assert data["base_model_relation"] == "adapter"
    assert data["library_name"] == "peft"
    assert data["pipeline_tag"] == "text-generation"
    assert {"mine", "lora", "base_model:adapter:org/base", f"swarm-base:{'a' * 40}"} <= set(data["tags"])
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_name) == ("val_loss", 1.25, "org/data")
    assert f'revision="{"a" * 40}"' in card.text


def test_a_base_in_a_directory_is_not_named_as_if_it_were_on_the_hub() -> None:
    manifest = Manifest(base_name="models", base_revision=f"local-{'b' * 40}")
    card = ModelCard(card_text(AdapterFacts(repo_id="me/mine"), manifest))
    assert "base_model" not in card.data.to_dict()
    assert card.data.tags is not None
    assert f"swarm-base:local-{'b' * 40}" in card.data.tags
    assert "revision=" not in card.text


def test_a_card_without_metrics_has_no_results() -> None:
    data = ModelCard(card_text(AdapterFacts(repo_id="me/mine"), Manifest())).data.to_dict()
    assert "model-index" not in data


def test_the_manifest_comes_back(tmp_path: Path) -> None:
    assert Manifest.read(tmp_path) is None
    MANIFEST.write(tmp_path)
    assert Manifest.read(tmp_path) == MANIFEST


def test_keys_of_a_newer_version_are_named_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        manifest = Manifest.parse(b'{"swarm_plugins_version": "9.9", "step": 3, "colour": "blue"}')
    assert manifest.step == 3
    assert "9.9" in caplog.text
    assert "colour" in caplog.text


@pytest.mark.parametrize("content", [b"", b"[]", b'{"step": "x"}', b"\xff", b"[" * 5000])
def test_a_damaged_manifest_is_refused(content: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"swarm.json of the adapter cannot be understood"):
        Manifest.parse(content)


def test_an_impossible_base_version_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"names an impossible base version"):
        _ = Manifest(base_name="x", base_revision="main").base


def test_a_huge_manifest_is_not_read(tmp_path: Path) -> None:
    (tmp_path / MANIFEST_FILE).write_bytes(b" " * (2 << 20))
    with pytest.raises(CheckpointError, match=r"more than 1048576 bytes"):
        Manifest.read(tmp_path)


def test_a_branch_in_pefts_config_is_no_version() -> None:
    assert PeftFacts.parse(b'{"base_model_name_or_path": "org/base", "revision": "main"}').base is None
    with pytest.raises(CheckpointError, match=r"adapter_config.json cannot be understood"):
        PeftFacts.parse(b"{")
