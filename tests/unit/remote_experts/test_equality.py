"""A model whose experts are at holders computes what the model alone does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

import pytest
import torch
from holders_kit import Held, serving
from torch import Tensor
from transformers import AutoModelForCausalLM, NemotronHConfig, PreTrainedModel

from swarm_plugins import OffloadConfig, load_offloaded, load_remote_experts
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.offload.held import load_held_experts
from swarm_plugins.server.startup.held_experts import measure_held
from swarm_plugins.weights.widths import Width

TOKENS = torch.tensor([[5, 6, 7, 8, 9, 10, 11], [20, 21, 22, 23, 24, 25, 26]])
WHOLE = {"a": Held(range(2)), "b": Held(range(2, 4))}
SLICES = {"a": Held(range(2), (0, 2)), "b": Held(range(2), (1, 2)), "c": Held(range(2, 4))}
OFFLOADED = {"a": Held(range(2), offload=OffloadConfig(fast_bytes=1 << 20, prefetch=False)), "b": Held(range(2, 4))}
SLICED_AND_OFFLOADED = {
    "a": Held(range(4), (0, 2), offload=OffloadConfig(fast_bytes=1 << 20, prefetch=False)),
    "b": Held(range(4), (1, 2)),
}


def local_model(directory: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(directory, experts_implementation="grouped_mm")
    return model.eval().requires_grad_(False)


def gradients(model: PreTrainedModel) -> tuple[Tensor, list[Tensor]]:
    """The loss's gradient of the embeddings and of everything else that both models have, routers above all."""
    embeds = model.get_input_embeddings()(TOKENS).detach().requires_grad_()
    kept = [p for name, p in model.named_parameters() if ".experts." not in name and "embed_tokens" not in name]
    for parameter in kept:
        parameter.requires_grad_()
    model(inputs_embeds=embeds, labels=TOKENS).loss.backward()
    assert embeds.grad is not None
    return embeds.grad, [parameter.grad for parameter in kept if parameter.grad is not None]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize(
    ("held", "is_exact"),
    [
        pytest.param(WHOLE, True, id="whole"),
        pytest.param(SLICES, False, id="slices"),
        pytest.param(OFFLOADED, True, id="offloaded"),
        pytest.param(SLICED_AND_OFFLOADED, False, id="sliced-offloaded"),
    ],
)
def test_logits_tokens_and_gradients(
    family: str, held: Mapping[str, Held], is_exact: bool, model_of: Callable[[str], Path]
) -> None:
    compare(model_of(family), held, is_exact=is_exact)


def test_a_pyramid_whose_layers_have_different_numbers_of_experts(model_of: Callable[[str], Path]) -> None:
    held = {
        "a": Held(range(3), blocks=range(1, 4)),
        "b": Held(range(3, 4), blocks=range(1, 2)),
        "c": Held(range(3, 6), (0, 2), blocks=range(3, 4)),
        "d": Held(range(3, 6), (1, 2), blocks=range(3, 4)),
    }
    compare(model_of("prmoe"), held, is_exact=False)


def test_experts_may_be_narrower_than_the_model(tmp_path: Path) -> None:
    config = NemotronHConfig(
        vocab_size=64,
        hidden_size=32,
        layers_block_type=["moe", "attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=24,
        moe_latent_size=16,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    compare(tmp_path, WHOLE, is_exact=True)
    with closing(load_held_experts(Checkpoint.open(tmp_path), range(1), range(2), device=torch.device("cpu"))) as held:
        assert held.hidden_size == 16
        assert measure_held(held).throughput > 0


def compare(directory: Path, held: Mapping[str, Held], *, is_exact: bool) -> None:
    local = local_model(directory)
    with serving(directory, held) as holders:
        remote = load_remote_experts(directory, connection=holders.connection)
        with torch.no_grad():
            found, expected = remote(TOKENS).logits, local(TOKENS).logits
        options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(remote.generate(TOKENS[:1], **options), local.generate(TOKENS[:1], **options))
        grads = gradients(remote)
    if is_exact:
        # The same rows of each expert meet the same product.
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grads, gradients(local), rtol=1e-4, atol=1e-5)
    assert {peer for peer, _ in holders.asked} == set(held)


@pytest.mark.parametrize("bits", [8, "nf4"])
def test_experts_in_few_bits_compute_what_they_do_offloaded(bits: Width, model_of: Callable[[str], Path]) -> None:
    directory = model_of("mixtral")
    local = load_offloaded(directory, config=OffloadConfig(fast_bytes=1 << 20, expert_bits=bits)).requires_grad_(False)
    with serving(directory, {"a": Held(range(2), bits=bits), "b": Held(range(2, 4), bits=bits)}) as holders:
        remote = load_remote_experts(directory, connection=holders.connection)
        with torch.no_grad():
            torch.testing.assert_close(remote(TOKENS).logits, local(TOKENS).logits, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradients(remote), gradients(local), rtol=1e-4, atol=1e-5)


def test_each_holder_gets_one_message_a_layer_and_each_token_once(model_of: Callable[[str], Path]) -> None:
    with serving(model_of("mixtral"), WHOLE) as holders:
        remote = load_remote_experts(holders.directory, connection=holders.connection)
        with torch.no_grad():
            remote(TOKENS)
    assert sorted(peer for peer, _ in holders.asked) == ["a", "a", "b", "b"]
    for _, request in holders.asked:
        assert request.hidden.shape[0] <= min(TOKENS.numel(), request.rows.shape[0])
    rows = [sum(len(r.rows) for _, r in holders.asked if r.block == block) for block in range(2)]
    assert rows == [TOKENS.numel() * 2] * 2
