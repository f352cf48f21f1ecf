"""Speculation over a swarm: the tokens of the local model, one trip of the chain a round, also if a server is lost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from generation_modes import PADDED, PADDED_MASK, PROMPT
from image_models import prompts, save_image_type
from peft import (
    LoraConfig,
    PeftConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from type_models import save_type

from swarm_plugins import AutoSwarmModelForCausalLM, AutoSwarmModelForImageTextToText, SwarmConfig
from swarm_plugins.checkpoint.tiny import FIRST_SPECIAL, VOCAB_SIZE
from swarm_plugins.client.sessions.session import ClientSession
from swarm_plugins.errors import ConfigError
from swarm_plugins.speculation import Speculation
from swarm_plugins.speculation import speculation as speculation_module
from swarm_plugins.speculation.choice import Chosen
from swarm_plugins.speculation.pace import Pace
from swarm_plugins.testing.in_process import InProcessSwarm
from swarm_plugins.testing.models import save_tiny

NEW_TOKENS = 16


@pytest.fixture(autouse=True)
def _always_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace, "pays_to_draft", lambda self, chances, drafted: chances > 0)
    monkeypatch.setattr(Pace, "pays_to_verify", lambda self, chances, drafted: True)


@pytest.fixture
def trips(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The new tokens of each trip of a session through its chain."""
    widths: list[int] = []
    step: Callable[..., object] = ClientSession.step

    def counted(self: ClientSession, inputs: object, ops: object = ()) -> object:
        widths.append(inputs.hidden.shape[1])  # type: ignore[attr-defined]
        return step(self, inputs, ops)

    monkeypatch.setattr(ClientSession, "step", counted)
    return widths


def decode(model: PreTrainedModel, *, batch: bool, speculation: Speculation | None = None) -> list[list[int]]:
    ids, mask = (PADDED, PADDED_MASK) if batch else (PROMPT, torch.ones_like(PROMPT))
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": 10_000}
    tokens: list[list[int]] = model.generate(  # type: ignore[operator]
        ids, attention_mask=mask, **options, **({} if speculation is None else {"custom_generate": speculation})
    ).tolist()
    return tokens


def noisy(model: PreTrainedModel) -> PreTrainedModel:
    """Makes a model say something else now and then."""
    other = copy.deepcopy(model)
    head = other.get_output_embeddings().weight
    with torch.no_grad():
        head.add_(torch.randn(head.shape, generator=torch.Generator().manual_seed(7)) * 0.25 * head.std())
    return other


@pytest.mark.parametrize("batch", [False, True], ids=["one row", "three rows"])
@pytest.mark.parametrize("pair", ["llama", "mixtral_sliding", "deepseek_v3", "gpt_oss"], indirect=True)
def test_tokens_are_the_local_ones_and_a_round_is_a_trip(pair: Any, trips: list[int], batch: bool) -> None:
    want = decode(pair.local, batch=batch)
    for one in (noisy(pair.load_local()), "lookup"):
        trips.clear()
        speculation = Speculation(one, max_tokens=4)
        assert decode(pair.remote, batch=batch, speculation=speculation) == want
        assert len(trips) == speculation.counts.rounds
        assert speculation.counts.accepted > 0 or one == "lookup"


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), id="prompt"),
        pytest.param(PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), id="p-tuning"),
        pytest.param(PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), id="prefix"),
        pytest.param(LoraConfig(task_type="CAUSAL_LM", r=2, init_lora_weights=False), id="lora"),
    ],
)
@pytest.mark.parametrize("batch", [False, True], ids=["one row", "three rows"])
@pytest.mark.parametrize("pair", ["llama", "mixtral_sliding"], indirect=True)
@pytest.mark.filterwarnings("ignore:Position ids are not supported")  # PEFT's, of prompts
def test_what_an_adapter_has_learned_counts_in_each_round(
    pair: Any, trips: list[int], batch: bool, config: PeftConfig
) -> None:
    tuned = []
    for base in (
        pair.load_local(),
        AutoSwarmModelForCausalLM.from_pretrained(pair.directory, connection=pair.swarm.connection),
    ):
        torch.manual_seed(0)
        tuned.append(get_peft_model(base, copy.copy(config)).eval())
        learned = [one for one in tuned[-1].parameters() if one.requires_grad]
        with torch.no_grad():
            for tensor in learned:
                tensor.normal_(std=0.1, generator=torch.Generator().manual_seed(len(learned)))
    local, remote = tuned
    want = decode(local, batch=batch)
    for one in (noisy(pair.load_local()), "lookup"):
        trips.clear()
        speculation = Speculation(one, max_tokens=4)
        assert decode(remote, batch=batch, speculation=speculation) == want
        assert len(trips) == speculation.counts.rounds
        assert max(trips[1:]) > 1, "drafted tokens were verified"


@pytest.mark.parametrize("batch", [False, True], ids=["one row", "three rows"])
def test_a_lost_server_changes_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trips: list[int], batch: bool
) -> None:
    directory = save_tiny("mixtral", tmp_path)
    local = AutoModelForCausalLM.from_pretrained(directory).eval()
    want = decode(local, batch=batch)
    spans = [(0, 2), (2, 4)] * 3  # any two may be of the same blocks
    with InProcessSwarm(directory, spans=spans, config=SwarmConfig(max_retries=6)) as swarm:
        remote = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)
        killed: list[str] = []
        choose = speculation_module.choose_greedy

        def kill_after_some(logits: Tensor, drafts: Tensor) -> Chosen:
            if len(trips) in (2, 3):
                busy = [peer for peer, service in swarm.services.items() if len(service.sessions)]
                killed.append(next(peer for peer in busy if peer not in killed))
                swarm.kill(killed[-1])
            return choose(logits, drafts)

        monkeypatch.setattr(speculation_module, "choose_greedy", kill_after_some)
        speculation = Speculation(noisy(local), max_tokens=4)
        assert decode(remote, batch=batch, speculation=speculation) == want
        assert len(killed) == 2
        assert len(trips) == speculation.counts.rounds


def test_a_text_that_gets_other_rotary_frequencies_begins_again_on_servers(tmp_path: Path, trips: list[int]) -> None:
    directory = save_type("phi3/longrope", tmp_path)
    local = AutoModelForCausalLM.from_pretrained(directory).eval()
    ids = torch.tensor([[5, 17, 99, 23, 5, 17]])
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": 10_000}
    want = local.generate(ids, **options)
    with InProcessSwarm(directory) as swarm:
        remote = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)
        assert remote.generate(ids, **options, custom_generate=Speculation(noisy(local), max_tokens=4)).equal(want)
    assert any(width >= 9 for width in trips), "the whole text ran again"


@pytest.mark.parametrize("rows", [("tt",), ("tit", "t")], ids=str)
def test_drafts_of_a_model_that_reads_images_change_no_token(tmp_path: Path, rows: tuple[str, ...]) -> None:
    directory = save_image_type("qwen3_5", tmp_path)
    local = AutoModelForImageTextToText.from_pretrained(directory).eval()
    inputs = prompts(local, *rows)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": 10_000}
    words_only = {"suppress_tokens": list(range(FIRST_SPECIAL, VOCAB_SIZE))}
    want = local.generate(**inputs, **options, **words_only)
    with InProcessSwarm(directory) as swarm:
        remote = AutoSwarmModelForImageTextToText.from_pretrained(directory, connection=swarm.connection)
        speculation = Speculation(noisy(local), max_tokens=4)
        assert remote.generate(**inputs, **options, **words_only, custom_generate=speculation).equal(want)
        assert speculation.counts.accepted > 0


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_a_cache_of_fixed_size_takes_drafts_where_no_block_runs_here(pair: Any) -> None:
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": 10_000}
    drafted = {**options, "custom_generate": Speculation(pair.local), "cache_implementation": "static"}
    assert pair.remote.generate(PROMPT, **drafted).equal(pair.local.generate(PROMPT, **options))
    partly = AutoSwarmModelForCausalLM.from_pretrained(
        pair.directory, connection=pair.swarm.connection, local_blocks=(1, 0)
    )
    with pytest.raises(ConfigError, match=r"can forget rejected tokens, got one with StaticLayer: leave out"):
        partly.generate(PROMPT, **drafted)
