"""Every causal-LM type of the installed transformers is equal over a swarm, or refused by one sentence that says why.

A type that a new release brings is in no table: look at what ``python tests/parity/every_type.py TYPE`` prints, and
put it into one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from every_type import REFUSALS, compare, compare_with_local, outcome, swarmed
from every_way import CONFIG, LIMITS, Pair, outcomes
from package_imports import ROOT
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from type_models import SPANS, TYPES, VARIANTS, matrix, save_type

from swarm_plugins import AutoSwarmModelForCausalLM, LocalSwarm, insert_module
from swarm_plugins.backbone import swarm_connection
from swarm_plugins.blocks.load import load_span
from swarm_plugins.blocks.runner import SpanInputs
from swarm_plugins.borders import pieces
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.checkpoint.partition import num_blocks_of
from swarm_plugins.checkpoint.tried import DECODERS, ENCODERS
from swarm_plugins.errors import ConfigError, UnsupportedError


def _names(text: str) -> list[str]:
    return text.split()


def _reasons(types: Mapping[str, str]) -> dict[str, str]:
    """Returns the reason of each type, given the types of each reason."""
    return {model_type: reason for reason, names in types.items() for model_type in _names(names)}


# One for each way of attending, routing, norming, scaling, and keeping states; the others are slow.
QUICK = (
    "llama",
    "gpt_oss",
    "gemma2",
    "deepseek_v3",
    "olmo2",
    "phi",
    "stablelm",
    "gpt_neox",
    "persimmon",
    "cohere",
    "bloom",
    "gpt2",
    "mamba",
    "qwen3_5_moe_text",
    "nemotron_h",
    "deepseek_v32",
    "gemma3",
    "qwen3_5",
    "hy_v4",
    "gemma3n_text",
    "gemma4_text",
    "zamba2",
    "zaya",
    "inkling2_text",
    "mllama",
    "minimax",
    "recurrent_gemma",
    "rwkv",
    "minimax_m3_vl_text",
    "qwen4_exp_text",
)
# One for each way to keep a session: keys and values, tied blocks, states in attention's place and beside it, an
# indexer's keys, states in an object of the family's own and on modules, no cache at all.
QUICK_WAYS = (
    "llama",
    "openai-gpt",
    "mamba",
    "qwen3_5_moe_text",
    "nemotron_h",
    "deepseek_v32",
    "gemma3n_text",
    "recurrent_gemma",
    "rwkv",
)
WORKS = {*DECODERS, *ENCODERS}
"""Types with the tokens, logits and gradients of the local model."""

REFUSED = _reasons({
    "do not run apart from each other": "reformer",
    "gives its layers hidden states of shape": "cpmant xlnet",
    "cannot be served": "moshi",
    "needs another package": "gemma3n",
    "lists of decoder layers": "hrm_text",
    "has no number of decoder layers": "blt",
})  # fmt: skip
"""Decoders that are refused, and what is said."""

NOT_DECODERS = _reasons({
    "lists of decoder layers": """
        bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet
        roberta-prelayernorm whisper xlm
    """,
    "hands on more than hidden states": "roformer",
    "does not call its layers one after another": "big_bird",
    "do not run with the caches of a server": "xmod",
    "transformers has no model for model_type": "musicgen musicgen_melody trocr",
})  # fmt: skip
"""Encoders and encoder-decoders that are refused, and what is said."""

UNBUILT = {
    "gemma4_assistant": "ValueError of transformers, from a config that no model can be made of",
    "gemma4_unified_assistant": "as gemma4_assistant",
}
"""Types whose reason of being refused is transformers' own."""

TABLES = (WORKS, REFUSED, NOT_DECODERS, UNBUILT)


def _first(table: Mapping[str, str]) -> set[str]:
    """Returns one type of each reason."""
    return set({reason: model_type for model_type, reason in table.items()}.values())


def test_each_type_of_transformers_is_in_one_table() -> None:
    found = Counter(name for table in TABLES for name in table)
    assert [name for name in TYPES if found[name] != 1] == []


def test_the_page_of_families_says_the_same() -> None:
    page = (ROOT / "docs/reference/families.md").read_text()
    told = dict(re.findall(r"^\| `([^`]+)` \| (works|refused) \|", page, re.MULTILINE))
    assert told == dict.fromkeys(DECODERS, "works") | dict.fromkeys([*REFUSED, *UNBUILT], "refused")
    assert f"Of {len(told)} decoders, {len(DECODERS)} run" in page
    assert f"[{len(DECODERS)} of the {len(told)} decoder types]" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("model_type", matrix(WORKS, QUICK))
def test_a_type_that_works_says_what_local_says(model_type: str, tmp_path: Path) -> None:
    compare(model_type, save_type(model_type, tmp_path))


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=() if name == "glm_moe_dsa/unshared" else pytest.mark.slow) for name in VARIANTS],
)
def test_a_variant_of_a_type_says_what_local_says(model_type: str, tmp_path: Path) -> None:
    compare(model_type, save_type(model_type, tmp_path))


@pytest.mark.parametrize("model_type", matrix(DECODERS, QUICK_WAYS, every=3))
def test_every_way_to_use_a_type_is_that_of_the_local_model(model_type: str, tmp_path: Path) -> None:
    """Beam search, drafts, prompts in chunks, forks, LoRA, a server that is killed."""
    directory = save_type(model_type, tmp_path)
    local = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with swarmed(directory, SPANS.get(model_type), config=CONFIG) as (remote, swarm):
        wrong = outcomes(Pair(remote, local, swarm))
    limits = LIMITS.get(model_type, {})
    assert wrong.keys() == limits.keys(), wrong
    assert [wrong[name] for name, what in limits.items() if not re.search(what, wrong[name])] == []


@pytest.mark.parametrize("model_type", matrix(QUICK, QUICK))
def test_each_block_of_a_span_runs_by_itself(model_type: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(save_type(model_type, tmp_path))
    # Behind the first block alone, several are skipped.
    with closing(load_span(checkpoint, range(num_blocks_of(checkpoint.config)))) as span:
        hidden = torch.randn(2, 5, span.spec.hidden_size, generator=torch.Generator().manual_seed(1))
        whole = span.forward(SpanInputs(blocks=span.spec.blocks, hidden=hidden)).hidden
        for piece in pieces(span.spec.blocks, span.spec.tied):
            hidden = span.forward(SpanInputs(blocks=piece, hidden=hidden)).hidden
        assert torch.equal(hidden, whole)


def test_of_a_checkpoint_with_a_tower_only_the_language_model_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save_type("qwen3_5_moe", tmp_path)
    # As published: layers that predict further tokens make another list.
    weights = load_file(directory / "model.safetensors")
    further = {f"mtp.layers.0.{name}": torch.zeros(2) for name in ("input_layernorm.weight", "mlp.gate.weight")}
    tower = {"model.visual.blocks.0.norm1.weight": torch.zeros(2)}
    save_file({**weights, **further, **tower}, directory / "model.safetensors")
    read: list[str] = []
    plain = Checkpoint.read

    def recorded(self: Checkpoint, names: Iterable[str], **kwargs: Any) -> dict[str, torch.Tensor]:
        read.extend(names := list(names))
        return plain(self, names, **kwargs)

    monkeypatch.setattr(Checkpoint, "read", recorded)
    compare("qwen3_5_moe", directory)
    assert {name.split(".")[0] for name in read} == {"model", "lm_head"}
    assert not [name for name in read if name.startswith("model.visual.")]


def test_hidden_states_that_are_collected_inside_of_blocks_are_refused(tmp_path: Path) -> None:
    with swarmed(save_type("zamba2", tmp_path)) as (remote, _):
        ids = torch.ones(1, 3, dtype=torch.long)
        with pytest.raises(UnsupportedError, match="collects them inside of blocks that are on servers"):
            remote(input_ids=ids, output_hidden_states=True)
        assert remote(input_ids=ids).logits.isfinite().all()


def test_blocks_that_look_at_images_are_refused_with_one_and_passed_without(tmp_path: Path) -> None:
    directory = save_type("mllama", tmp_path)
    local = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ids = torch.arange(3, 9)[None]
    with swarmed(directory) as (remote, _), torch.no_grad():
        for use_cache in (False, True):
            with pytest.raises(UnsupportedError, match=r"do not take .* cross_attention_states"):
                remote(ids, cross_attention_states=torch.randn(1, 7, 32), use_cache=use_cache)
        found, expected = (model(ids, output_hidden_states=True, use_cache=False) for model in (remote, local))
        assert len(found.hidden_states) == len(expected.hidden_states) == 3  # without those of the two
        assert all(map(torch.equal, found.hidden_states, expected.hidden_states))
        with pytest.raises(ConfigError, match="calls that block with images alone"):
            insert_module(remote, "mine", torch.nn.Identity(), after=1)


# What only servers' own processes do: they measure their blocks before they offer them. Types that differ from these
# in numbers alone take hours.
OF_ITS_OWN_KIND = _names("bloom deepseek_v4 gemma4 glm_moe_dsa nemotron_h")
OF_THE_SAME_KIND = _names("deepseek_v32 gemma4_text qwen3_5_moe_text zaya")


@pytest.mark.parametrize(
    "model_type",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in OF_ITS_OWN_KIND),
        *(pytest.param(name, marks=pytest.mark.hours) for name in OF_THE_SAME_KIND),
    ],
)
def test_a_type_of_its_own_kind_is_served_by_processes(model_type: str, tmp_path: Path) -> None:
    directory = save_type(model_type, tmp_path)
    with LocalSwarm(directory, num_servers=2, dtype="float32") as swarm:
        remote = AutoSwarmModelForCausalLM.from_pretrained(directory, initial_peers=swarm.initial_peers)
        compare_with_local(remote, directory)
        swarm_connection(remote).close()


@pytest.mark.parametrize("model_type", matrix({**REFUSED, **NOT_DECODERS}, _first(REFUSED)))
def test_a_refused_type_is_told_why(model_type: str, tmp_path: Path) -> None:
    reason = {**REFUSED, **NOT_DECODERS}[model_type]
    directory = save_type(model_type, tmp_path)
    with pytest.raises(REFUSALS, match=reason) as refusal:
        compare(model_type, directory)
    assert re.fullmatch(r"[^\n]+", str(refusal.value))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", matrix(UNBUILT, UNBUILT))
def test_a_type_that_cannot_be_built_is_refused(model_type: str) -> None:
    assert outcome(model_type).startswith("refused")
