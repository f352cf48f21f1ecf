"""Models with recurrent and convolution states: every way to generate, and servers that are lost on the way."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from generation_modes import MODES
from generation_modes import PROMPT as LOOKUP
from peft import LoraConfig, PeftModel, get_peft_model
from test_speculation import noisy
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, DynamicCache, LogitsProcessor, PreTrainedModel
from type_models import save_type

from swarm_plugins import AutoSwarmModelForCausalLM, SwarmConfig
from swarm_plugins.backbone import swarm_connection
from swarm_plugins.client.sessions import pipe
from swarm_plugins.errors import SwarmError
from swarm_plugins.speculation import Speculation
from swarm_plugins.speculation.pace import Pace
from swarm_plugins.testing.in_process import InProcessSwarm

# States beside attention; the others keep states, too, in other shapes, and are slow.
TYPES = [
    "nemotron_h",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("qwen3_5_moe_text", "minimax_m3_vl_text", "qwen4_exp_text")
    ),
]
SOME_MODES = ("greedy_padded", "beam_padded", "prefill_in_chunks", "several_turns", "copied_cache", "without_cache")
QUICK = SwarmConfig(max_retries=6, request_timeout_s=20.0)
PROMPT = {"input_ids": torch.arange(5, 12)[None], "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(scope="module", params=TYPES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_type(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def local(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.fixture
def swarm(directory: Path, local: PreTrainedModel) -> Iterator[InProcessSwarm]:
    last = local.config.num_hidden_layers
    spans = [(0, 2), (2, last), (0, 2), (2, last)]
    with InProcessSwarm(directory, spans=spans, config=QUICK) as running:
        yield running


@pytest.fixture
def remote(directory: Path, swarm: InProcessSwarm) -> PreTrainedModel:
    return AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)


@pytest.mark.parametrize("name", SOME_MODES)
def test_remote_says_what_local_says(name: str, remote: PreTrainedModel, local: PreTrainedModel) -> None:
    assert MODES[name](remote, remote) == MODES[name](local, local)


def test_eight_clients_at_once_get_the_local_tokens(remote: PreTrainedModel, local: PreTrainedModel) -> None:
    """Of prompts of different lengths; the servers pack their steps as they come."""
    wanted = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    prompts = [torch.arange(5 + index, 8 + 3 * index)[None] for index in range(8)]
    expected = [local.generate(prompt, **wanted).tolist() for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as threads:
        found = list(threads.map(lambda prompt: remote.generate(prompt, **wanted).tolist(), prompts))
    assert found == expected


@pytest.mark.parametrize("why", ["pipe", "message", "pack"])
def test_padding_beyond_the_first_chunk_runs_with_it(
    why: str,
    directory: Path,
    swarm: InProcessSwarm,
    local: PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In chunks for servers that work at once, as small as they allow, or as a server packs."""
    if why == "pipe":
        monkeypatch.setattr(pipe, "_LEAST_TOKENS", 1)
        monkeypatch.setattr(pipe, "num_chunks", lambda *_: 4)
    for service in swarm.services.values():
        if why == "message":
            service.describe(max_batch_tokens=128)
        elif why == "pack":
            service.scheduler._thread._chunk_tokens = 128
    remote = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)
    ids = torch.randint(3, 90, (2, 200), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :100] = 0
    wanted = {"attention_mask": mask, "max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
    found = remote.generate(ids, **wanted).tolist()
    # The local model of this type depends on how a padded text is cut.
    assert local.config.model_type == "minimax_m3_vl_text" or found == local.generate(ids, **wanted).tolist()


class Killer(LogitsProcessor):
    """Kills a server that the running session uses, after some tokens."""

    def __init__(self, swarm: InProcessSwarm) -> None:
        self.swarm = swarm
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 4:
            self.swarm.kill(next(peer for peer, service in self.swarm.services.items() if len(service.sessions)))
        return scores


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beam"])
def test_states_of_a_lost_server_are_rebuilt(
    options: dict[str, int], swarm: InProcessSwarm, remote: PreTrainedModel, local: PreTrainedModel
) -> None:
    ids = torch.tensor([[5, 17, 99, 23, 64, 9, 88]])
    wanted = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False, "pad_token_id": 0, **options}
    found = remote.generate(ids, logits_processor=[Killer(swarm)], **wanted)
    assert torch.equal(found, local.generate(ids, **wanted))


@torch.no_grad()
def test_a_session_that_cannot_go_back_is_replayed(remote: PreTrainedModel, local: PreTrainedModel) -> None:
    ids = torch.tensor([[5, 17, 99, 23, 64, 9, 88, 31, 40]])
    cache = remote(ids[:, :4], use_cache=True).past_key_values
    for token in (4, 5, 6):
        remote(ids[:, token : token + 1], past_key_values=cache)
    cache.crop(-2)  # to 5 tokens: the server has kept the states at 7 and at 6
    other = torch.tensor([[60]])
    found = remote(other, past_key_values=cache).logits
    whole = local(torch.cat([ids[:, :5], other], dim=1), use_cache=False).logits[:, -1:]
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)


DRAFTS = {
    "lookup": lambda local: {"prompt_lookup_num_tokens": 3},
    "assistant": lambda local: {"assistant_model": noisy(local)},
    "speculation": lambda local: {"custom_generate": Speculation(noisy(local), max_tokens=4)},
    "speculation_lookup": lambda local: {"custom_generate": Speculation("lookup", max_tokens=4)},
}


@pytest.mark.parametrize("name", DRAFTS)
def test_rejected_drafts_are_taken_back_by_the_servers(
    name: str, remote: PreTrainedModel, local: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pace, "pays_to_draft", lambda self, chances, drafted: chances > 0)
    monkeypatch.setattr(Pace, "pays_to_verify", lambda self, chances, drafted: True)
    wanted = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    expected = local.generate(LOOKUP, **wanted).tolist()
    assert remote.generate(LOOKUP, **wanted, **DRAFTS[name](local)).tolist() == expected
    # Without a replay of the text.
    assert swarm_connection(remote).counts.failures == {}


def test_states_of_local_blocks_do_not_go_back(tmp_path: Path) -> None:
    directory = save_type("qwen3_5_moe_text", tmp_path)
    with InProcessSwarm(directory, config=QUICK) as swarm, torch.no_grad():
        model = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection, local_blocks=(1, 0))
        cache = model(PROMPT["input_ids"], use_cache=True).past_key_values
        cache.activate_past_recording()
        model(torch.tensor([[3, 4]]), past_key_values=cache)
        cache.crop(-1)
        with pytest.raises(SwarmError, match="taken back from a cache with states of local blocks"):
            model(torch.tensor([[3]]), past_key_values=cache)
        with pytest.raises(SwarmError, match="keeps states here that cannot take back rejected tokens"):
            model.generate(**PROMPT, custom_generate=Speculation("lookup"))


def tuned(model: PreTrainedModel, modules: str) -> PeftModel:
    peft_model = get_peft_model(model, LoraConfig(r=2, target_modules=modules.split(), task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in peft_model.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
    return peft_model


def gradients(model: PeftModel) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns logits, and the gradients of a loss by the adapter's parameter."""
    ids = torch.arange(5, 19).reshape(2, 7)
    logits = model(input_ids=ids, use_cache=False).logits
    cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    return logits.detach(), {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize(
    ("model_type", "modules"),
    [
        ("nemotron_h", "in_proj o_proj down_proj"),
        ("qwen3_5_moe_text", "in_proj_qkv in_proj_a out_proj q_proj"),
        ("mamba", "in_proj x_proj"),
    ],
)
def test_lora_on_projections_of_mixers_is_that_of_the_local_model(
    model_type: str, modules: str, tmp_path: Path
) -> None:
    directory = save_type(model_type, tmp_path)
    local = tuned(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval(), modules)
    with InProcessSwarm(directory, config=QUICK) as swarm:
        remote = tuned(AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection), modules)
        (logits, found), (expected, wanted) = gradients(remote), gradients(local)
        assert remote.generate(**PROMPT).tolist() == local.generate(**PROMPT).tolist()
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert sorted(found) == sorted(wanted)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-6, msg=name)


def test_local_blocks_with_states_run_before_remote_ones(
    directory: Path, swarm: InProcessSwarm, local: PreTrainedModel
) -> None:
    model = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection, local_blocks=(1, 0))
    assert model.generate(**PROMPT).tolist() == local.generate(**PROMPT).tolist()


def test_states_of_local_blocks_that_have_seen_a_failed_step_are_not_used(tmp_path: Path) -> None:
    directory = save_type("qwen3_5_moe_text", tmp_path)
    ids, new = PROMPT["input_ids"], torch.tensor([[3]])
    with InProcessSwarm(directory, config=QUICK) as swarm, torch.no_grad():
        model = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection, local_blocks=(1, 0))
        cache = model(input_ids=ids).past_key_values
        swarm.kill(swarm.peers[-1])
        with pytest.raises(SwarmError, match="no living server"):
            model(input_ids=new, past_key_values=cache)
        with pytest.raises(SwarmError, match=r"holds states of the local blocks .* start with a new cache"):
            model(input_ids=new, past_key_values=cache)


def test_a_refused_call_leaves_no_tokens_in_states_of_local_blocks(tmp_path: Path) -> None:
    directory, ids = save_type("qwen3_5_moe_text", tmp_path), PROMPT["input_ids"]
    local = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with InProcessSwarm(directory) as swarm, torch.no_grad():
        model = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection, local_blocks=(1, 0))
        cache = DynamicCache(config=model.config)

        def refused() -> None:
            # Found out at the first remote block, when the local one has run.
            with pytest.raises(SwarmError, match="output_attentions"):
                model(input_ids=ids, past_key_values=cache, output_attentions=True)

        refused()
        found = model(input_ids=ids, past_key_values=cache).logits
        torch.testing.assert_close(found, local(input_ids=ids).logits)
        refused()
        with pytest.raises(SwarmError, match="start with a new cache"):
            model(input_ids=ids, past_key_values=cache)


def test_a_model_whose_layers_take_ids_says_so_of_embeddings(tmp_path: Path) -> None:
    directory = save_type("deepseek_v4", tmp_path)
    with InProcessSwarm(directory) as swarm:
        model = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)
        embeddings = torch.randn(1, 3, model.config.hidden_size)
        with pytest.raises(SwarmError, match="layers of this model take the ids of tokens: call it with input_ids"):
            model(inputs_embeds=embeddings)


def test_lora_on_a_module_that_is_never_called_is_refused_by_name(tmp_path: Path) -> None:
    # Mamba's mixer multiplies by the weight of dt_proj itself: locally, LoRA there is without effect.
    directory = save_type("mamba", tmp_path)
    with InProcessSwarm(directory, config=QUICK) as swarm:
        remote = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)
        with pytest.raises(SwarmError, match=r"mixer\.dt_proj, whose weight is read by another module: .*leave it out"):
            gradients(tuned(remote, "dt_proj in_proj"))
