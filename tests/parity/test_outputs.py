"""What a forward pass returns over a swarm is what the local model returns, gradients included.

Tolerance of float32 comparisons: the server may use another attention kernel or another order of sums than the
local model, which differ by about 1e-6 for activations of size one.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForSequenceClassification, DynamicCache

from swarm_plugins.backbone import (
    AutoSwarmModel,
    AutoSwarmModelForCausalLM,
    AutoSwarmModelForSequenceClassification,
)
from swarm_plugins.client import SwarmConfig
from swarm_plugins.errors import UnsupportedError
from swarm_plugins.testing.in_process import InProcessSwarm
from swarm_plugins.testing.models import save_tiny
from swarm_plugins.transport.messages import Codec

FP32 = {"atol": 1e-5, "rtol": 1e-5}
IDS = torch.tensor([[5, 17, 99, 23, 64, 9, 88], [31, 64, 9, 88, 12, 101, 7]])
LEFT = torch.tensor([[0, 0, 0, 23, 64, 9, 88], [31, 64, 9, 88, 12, 101, 7]])
RIGHT = torch.tensor([[5, 17, 99, 23, 0, 0, 0], [31, 64, 9, 88, 12, 101, 7]])
RESTARTED = torch.arange(7).repeat(2)[None]  # [1, 14]: two sequences of 7 tokens in one row
WITH_ROUTERS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "prmoe")
few_families = pytest.mark.parametrize("pair", ["llama", "mixtral"], indirect=True)
llama_only = pytest.mark.parametrize("pair", ["llama"], indirect=True)


def close(got: Tensor, want: Tensor) -> None:
    """Compares in float32 at the tolerance of this module."""
    torch.testing.assert_close(got, want, **FP32)


def positions_of(mask: Tensor) -> Tensor:
    """Positions that count real tokens only."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@torch.no_grad()
def test_logits_are_equal(pair, padding: str) -> None:
    ids = {"none": IDS, "left": LEFT, "right": RIGHT}[padding]
    mask = (ids != 0).long()
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions_of(mask)}
    real = mask.bool()
    close(pair.remote(**inputs).logits[real], pair.local(**inputs).logits[real])


@torch.no_grad()
def test_hidden_states_of_every_layer_are_equal(pair) -> None:
    got = pair.remote(IDS, output_hidden_states=True, use_cache=False).hidden_states
    want = pair.local(IDS, output_hidden_states=True, use_cache=False).hidden_states
    assert len(got) == len(want) == pair.local.config.num_hidden_layers + 1
    for mine, theirs in zip(got, want, strict=True):
        close(mine, theirs)


@torch.no_grad()
def test_hidden_states_of_generation_are_equal(pair) -> None:
    options = {"max_new_tokens": 3, "return_dict_in_generate": True, "output_hidden_states": True, "pad_token_id": 0}
    got = pair.remote.generate(IDS, do_sample=False, output_scores=True, **options)
    want = pair.local.generate(IDS, do_sample=False, output_scores=True, **options)
    for mine, theirs in zip(got.hidden_states, want.hidden_states, strict=True):
        for layer_of_mine, layer_of_theirs in zip(mine, theirs, strict=True):
            close(layer_of_mine, layer_of_theirs)
    for mine, theirs in zip(got.scores, want.scores, strict=True):
        close(mine, theirs)


@pytest.mark.parametrize("pair", WITH_ROUTERS, indirect=True)
@pytest.mark.parametrize("use_cache", [False, True])
@torch.no_grad()
def test_router_logits_are_equal(pair, use_cache: bool) -> None:
    got = pair.remote(IDS, output_router_logits=True, use_cache=use_cache).router_logits
    want = pair.local(IDS, output_router_logits=True, use_cache=use_cache).router_logits
    config = pair.local.config
    assert len(got) == len(want) == len(getattr(config, "moe_layers", range(config.num_hidden_layers)))
    for mine, theirs in zip(got, want, strict=True):
        close(mine, theirs)


@pytest.mark.parametrize("pair", WITH_ROUTERS, indirect=True)
def test_auxiliary_loss_and_its_gradient_are_equal(pair) -> None:
    # The loss alone has a tiny gradient; as the whole loss it cannot hide behind the other.
    losses, gradients = [], []
    for model in (pair.remote, pair.local):
        embedded = model.get_input_embeddings()(LEFT).detach().requires_grad_()
        mask = (LEFT != 0).long()
        out = model(
            inputs_embeds=embedded, attention_mask=mask, labels=LEFT, output_router_logits=True, use_cache=False
        )
        losses.append((out.loss, out.aux_loss))
        gradients.append(torch.autograd.grad(out.loss + 10 * out.aux_loss, embedded)[0])
    for mine, theirs in zip(*losses, strict=True):
        close(mine, theirs)
    close(*gradients)


def test_gradient_of_the_loss_reaches_embeddings_and_head(pair) -> None:
    gradients = []
    for model in (pair.load_remote(), pair.load_local()):
        mask = (LEFT != 0).long()
        model(LEFT, attention_mask=mask, labels=LEFT.masked_fill(LEFT == 0, -100)).loss.backward()
        weights = (model.get_input_embeddings().weight, model.get_output_embeddings().weight, model.model.norm.weight)
        gradients.append([weight.grad for weight in weights])
    for mine, theirs in zip(*gradients, strict=True):
        assert theirs.abs().max() > 1e-4
        close(mine, theirs)


@few_families
def test_gradients_of_hidden_states_are_equal(pair) -> None:
    gradients = []
    for model in (pair.remote, pair.local):
        embedded = model.get_input_embeddings()(IDS).detach().requires_grad_()
        states = model(inputs_embeds=embedded, output_hidden_states=True, use_cache=False).hidden_states
        # A different weight for each layer: a gradient sent to the wrong layer would show.
        total = sum(weight * state.square().mean() for weight, state in enumerate(states, start=1))
        gradients.append(torch.autograd.grad(total, embedded)[0])
    close(*gradients)


@torch.no_grad()
def test_packed_sequences_do_not_see_each_other(pair) -> None:
    ids = IDS.reshape(1, -1)
    got = pair.remote(ids, position_ids=RESTARTED, use_cache=False).logits
    close(got, pair.local(ids, position_ids=RESTARTED, use_cache=False).logits)
    if pair.family != "gpt_oss":  # transformers 5.23 does not look at the positions there
        close(got[0], pair.local(IDS, use_cache=False).logits.flatten(0, 1))


@few_families
@pytest.mark.parametrize("options", [{"attention_mask": torch.ones(1, 14)}, {"use_cache": True}], ids=["mask", "cache"])
def test_restarted_positions_pack_only_without_mask_and_cache(pair, options: dict[str, object]) -> None:
    """transformers takes restarted positions for packed sequences only where it has neither mask nor cache."""
    ids = IDS.reshape(1, -1)
    logits = []
    for model in (pair.remote, pair.local):
        embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
        for enabled in (True, False):
            with torch.set_grad_enabled(enabled):
                logits.append(model(inputs_embeds=embedded, position_ids=RESTARTED, **options).logits)
    for got, want in zip(logits[:2], logits[2:], strict=True):
        close(got, want)


@few_families
@torch.no_grad()
def test_base_model_gives_the_last_hidden_state(pair) -> None:
    remote = AutoSwarmModel.from_pretrained(pair.directory, connection=pair.swarm.connection)
    local = AutoModel.from_pretrained(pair.directory).eval()
    assert type(remote) is type(local)
    close(remote(IDS).last_hidden_state, local(IDS).last_hidden_state)


@few_families
def test_classifier_pools_and_trains_like_the_local_one(pair) -> None:
    remote = AutoSwarmModelForSequenceClassification.from_pretrained(
        pair.directory, connection=pair.swarm.connection, num_labels=3
    )
    local = AutoModelForSequenceClassification.from_pretrained(pair.directory, num_labels=3).eval()
    assert type(remote) is type(local)
    assert remote.score.weight.shape == (3, local.config.hidden_size)
    assert remote.score.weight.std() > 0
    remote.score.load_state_dict(local.score.state_dict())
    for ids in (LEFT, RIGHT):
        labels = torch.tensor([2, 0])
        losses = []
        for model in (remote, local):
            model.zero_grad()
            out = model(ids, attention_mask=(ids != 0).long(), labels=labels)
            out.loss.backward()
            losses.append(out.loss)
        close(*losses)
        close(remote.score.weight.grad, local.score.weight.grad)


@few_families
@torch.no_grad()
def test_bfloat16_client_agrees_with_float32_servers(pair) -> None:
    remote = pair.load_remote(dtype=torch.bfloat16)
    assert remote.lm_head.weight.dtype == torch.bfloat16
    assert remote.model.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16
    got = remote(IDS).logits
    assert got.dtype == torch.bfloat16
    # bfloat16 keeps 8 bits: embeddings, final norm, head and the wire each round by 2^-9 of values around one.
    torch.testing.assert_close(got.float(), pair.local(IDS).logits, atol=0.1, rtol=0.05)
    assert remote.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0).shape == (2, 11)


@llama_only
def test_float32_client_agrees_with_bfloat16_servers(pair) -> None:
    with InProcessSwarm(pair.directory, dtype=torch.bfloat16) as swarm:
        remote = AutoSwarmModelForCausalLM.from_pretrained(pair.directory, connection=swarm.connection)
        embedded = remote.get_input_embeddings()(IDS).detach().requires_grad_()
        logits = remote(inputs_embeds=embedded, use_cache=False).logits
        assert logits.dtype == torch.float32
        # Four layers in bfloat16 round every product by 2^-9; the sums of this toy are of size one.
        torch.testing.assert_close(logits, pair.local(IDS).logits, atol=0.1, rtol=0.1)
        (gradient,) = torch.autograd.grad(logits.square().mean(), embedded)
        assert gradient.dtype == torch.float32
        assert remote.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0).shape == (2, 11)


@llama_only
@pytest.mark.parametrize(("codec", "error"), [("float16", 0.005), ("rotated8", 0.05), ("bfloat16", 0.02)])
def test_codecs_cost_what_they_round_away(pair, codec: Codec, error: float) -> None:
    """Relative to the whole tensor, at four crossings: 11, 8, or 7 bits of the largest number of each rotated block."""
    embedded = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(0))
    found = []
    with InProcessSwarm(pair.directory, config=SwarmConfig(codec=codec)) as swarm:
        packing = AutoSwarmModelForCausalLM.from_pretrained(pair.directory, connection=swarm.connection)
        for model in (packing, pair.local):
            inputs = embedded.clone().requires_grad_()
            logits = model(inputs_embeds=inputs, use_cache=False).logits
            found.append((logits.detach(), torch.autograd.grad(logits.square().mean(), inputs)[0]))
    for got, want in zip(*found, strict=True):
        assert 0 < (got - want).norm() / want.norm() < error


@few_families
def test_tokens_seen_with_gradients_enabled_can_be_continued(pair) -> None:
    """The first pass needs gradients and runs outside the session; the session gets its tokens when it goes on."""
    logits = []
    for model in (pair.remote, pair.local):
        cache = DynamicCache(config=model.config)
        embedded = model.get_input_embeddings()(IDS).detach().requires_grad_()
        model(inputs_embeds=embedded, past_key_values=cache, use_cache=True)
        assert cache.get_seq_length() == 7
        with torch.no_grad():
            logits.append(model(torch.tensor([[40], [41]]), past_key_values=cache, use_cache=True).logits)
    close(*logits)


@few_families
def test_tokens_seen_with_gradients_enabled_can_be_cropped_and_forked(pair) -> None:
    logits = []
    for model, is_remote in ((pair.remote, True), (pair.local, False)):
        cache = DynamicCache(config=model.config)
        embedded = model.get_input_embeddings()(IDS).detach().requires_grad_()
        # transformers itself cannot copy a cache whose tensors have a gradient.
        with torch.set_grad_enabled(is_remote):
            model(inputs_embeds=embedded, past_key_values=cache, use_cache=True)
        twin = copy.deepcopy(cache)
        cache.crop(-3)
        with torch.no_grad():
            next_ids = torch.tensor([[40], [41]])
            logits += [model(next_ids, past_key_values=each, use_cache=True).logits for each in (cache, twin)]
    close(logits[0], logits[2])
    close(logits[1], logits[3])


@llama_only
def test_gradients_through_a_used_cache_are_refused(pair) -> None:
    cache = DynamicCache(config=pair.remote.config)
    with torch.no_grad():
        pair.remote(IDS, past_key_values=cache)
    with pytest.raises(UnsupportedError, match=r"gradients cannot flow through a KV cache.*torch.no_grad\(\)"):
        pair.remote(IDS, past_key_values=cache)


@llama_only
def test_attentions_are_refused(pair) -> None:
    with pytest.raises(UnsupportedError, match="output_attentions=True cannot work on remote blocks"):
        pair.remote(IDS, output_attentions=True)
    with pytest.raises(UnsupportedError, match="output_attentions=True cannot work on remote blocks"):
        pair.remote.generate(IDS, output_attentions=True, return_dict_in_generate=True, max_new_tokens=2)


@few_families
def test_masks_of_one_s_own_are_refused(pair) -> None:
    mask = torch.ones(2, 1, 7, 7).tril().bool()
    with pytest.raises(UnsupportedError, match=r"padding mask of shape \[batch, length\], got \(2, 1, 7, 7\)"):
        pair.remote(IDS, attention_mask=mask)


@llama_only
def test_unknown_tensor_arguments_are_refused(pair) -> None:
    with pytest.raises(UnsupportedError, match=r"do not take the tensor argument\(s\) cu_seq_lens_q"):
        pair.remote(IDS, cu_seq_lens_q=torch.tensor([0, 7]))


@llama_only
@torch.no_grad()
def test_hooks_that_change_what_goes_between_blocks_are_refused(pair) -> None:
    remote = pair.load_remote()
    handle = remote.model.layers[1].register_forward_hook(lambda module, args, output: output + 1)
    with pytest.raises(UnsupportedError, match="changed between remote blocks 1 and 2"):
        remote(IDS)
    handle.remove()
    handle = remote.model.layers[2].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    with pytest.raises(UnsupportedError, match="changed between remote blocks 1 and 2"):
        remote(IDS)
    handle.remove()
    close(remote(IDS).logits, pair.local(IDS).logits)


@llama_only
@torch.no_grad()
def test_hooks_at_the_ends_of_the_chain_work(pair) -> None:
    logits = []
    for model in (pair.load_remote(), pair.load_local()):
        model.model.layers[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        model.model.layers[3].register_forward_hook(lambda module, args, output: output + 1)
        logits.append(model(IDS).logits)
    close(*logits)


@torch.no_grad()
def test_cache_of_another_model_is_refused(llama, tmp_path) -> None:
    other = other_model(tmp_path)
    with InProcessSwarm(other) as swarm:
        stranger = AutoSwarmModelForCausalLM.from_pretrained(other, connection=swarm.connection)
        cache = DynamicCache(config=stranger.config)
        stranger(IDS, past_key_values=cache)
        with pytest.raises(UnsupportedError, match=r"this cache belongs to .*start with a new cache"):
            llama.remote(IDS, past_key_values=cache)


@torch.no_grad()
def test_remote_cache_is_refused_by_a_local_model(llama) -> None:
    cache = DynamicCache(config=llama.remote.config)
    llama.remote(IDS, past_key_values=cache)
    with pytest.raises(UnsupportedError, match="cannot be used by a local model"):
        llama.local(IDS, past_key_values=cache)


@torch.no_grad()
def test_cache_filled_by_a_local_model_is_continued(pair) -> None:
    """Keys and values that are there already are shipped as the session's start."""
    logits = []
    for model in (pair.remote, pair.local):
        cache = DynamicCache()
        pair.local(IDS, past_key_values=cache)
        logits.append(model(torch.tensor([[40], [41]]), past_key_values=cache).logits)
    close(*logits)


def other_model(directory: Path) -> Path:
    """A llama with other weights, so of another version."""
    return save_tiny("llama", directory / "other", seed=7)
