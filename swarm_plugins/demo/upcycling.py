"""Turns a dense Llama into a Mixtral checkpoint, layer by layer, so that memory never holds a second model.

A variant with all neurons computes exactly the dense model's outputs, whatever the router picks: its experts are equal,
and their weights add up to one. Experts with fewer neurons differ, as in a trained mixture.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, MixtralConfig, PreTrainedModel

from swarm_plugins.demo.clusters import load_entropy, router_of, uses
from swarm_plugins.demo.experts import GatedMLP, cut_expert, moments
from swarm_plugins.demo.progress import Progress
from swarm_plugins.demo.writing import Shards

TOP_K = 2
"""Experts per token."""
_OF_ALL = 0.2
"""Weight of all states in the fit of an expert: it gets few states, and fitting these alone would fit their noise."""
_OF_FIRST = 1 / 64
"""Weight of first positions relative to all others: their frequency in short texts."""
_LAYERS_PER_FILE = 5
_ROWS_AT_ONCE = 8
_KEPT = (
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "pad_token_id",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "use_cache",
    "vocab_size",
)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How the experts are made."""

    num_experts: int
    neurons: int
    """Neurons of an expert."""

    @property
    def name(self) -> str:
        """Experts and neurons, such as ``4x1536``."""
        return f"{self.num_experts}x{self.neurons}"


class Seen(NamedTuple):
    """Inputs of an MLP, ``[N, D]`` each."""

    states: Tensor
    """Inputs at all positions but the first."""
    first: Tensor
    """Inputs at the first position, which all later ones attend to: a hundred times as large as any other."""


def mixtral_config(dense: LlamaConfig, variant: Variant) -> MixtralConfig:
    """Returns the config of the mixture: the dense model's, except for the MLPs."""
    return MixtralConfig(
        **{name: getattr(dense, name) for name in _KEPT},
        architectures=["MixtralForCausalLM"],
        dtype="float32",
        intermediate_size=variant.neurons,
        num_experts_per_tok=TOP_K,
        num_local_experts=variant.num_experts,
        sliding_window=None,
    )


def calibrate(model: PreTrainedModel, pieces: Tensor) -> list[Seen]:
    """Returns the inputs of the MLP of each layer of a dense model over tokens ``[pieces, length]``."""
    layers = _layers(model)
    seen: list[list[Tensor]] = [[] for _ in layers]
    hooks = []
    for layer, found in zip(layers, seen, strict=True):

        def keep(_: nn.Module, inputs: tuple[Tensor, ...], found: list[Tensor] = found) -> None:
            found.append(inputs[0].clone())  # [B, S, D]

        hooks.append(layer.get_submodule("mlp").register_forward_pre_hook(keep))
    try:
        with torch.inference_mode(), Progress("reading text", len(pieces), "pieces") as bar:
            for batch in pieces.split(_ROWS_AT_ONCE):
                model.get_submodule("model")(input_ids=batch, use_cache=False)
                bar.advance(len(batch))
    finally:
        for hook in hooks:
            hook.remove()
    joined = map(torch.cat, seen)
    return [Seen(states=one[:, 1:].flatten(0, 1), first=one[:, 0]) for one in joined]


def write_weights(model: PreTrainedModel, seen: list[Seen], variant: Variant, folder: Path, *, seed: int) -> float:
    """Writes the mixture's weights, emptying ``seen``; returns the lowest `load_entropy` of a layer."""
    generator = torch.Generator().manual_seed(seed)
    layers = _layers(model)
    files = Shards(folder, 1 + -(-len(layers) // _LAYERS_PER_FILE))
    files.write(dict(_outside_layers(model)))
    entropy = 1.0
    chunk: dict[str, Tensor] = {}
    with torch.inference_mode(), Progress("making experts", len(layers), "layers") as bar:
        for index, layer in enumerate(layers):
            inputs, seen[index] = seen[index], Seen(torch.empty(0), torch.empty(0))
            router = router_of(inputs.states, variant.num_experts, top_k=TOP_K, generator=generator)
            entropy = min(entropy, load_entropy(uses(inputs.states, router, TOP_K)))
            chunk.update(_mixture_layer(f"model.layers.{index}.", layer, router, inputs, variant.neurons))
            if (index + 1) % _LAYERS_PER_FILE == 0 or index + 1 == len(layers):
                files.write(chunk)
                chunk = {}
            bar.advance()
    return entropy


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    return list(model.get_submodule("model.layers").children())


def _outside_layers(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in model.state_dict().items():
        is_copy = name == "lm_head.weight" and model.config.tie_word_embeddings
        if not name.startswith("model.layers.") and not is_copy:
            yield name, tensor.contiguous()


def _mixture_layer(
    prefix: str, layer: nn.Module, router: Tensor, inputs: Seen, neurons: int
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in layer.state_dict().items():
        if not name.startswith("mlp."):
            yield prefix + name, tensor.contiguous()
    yield f"{prefix}block_sparse_moe.gate.weight", router.contiguous()
    weights = [layer.get_parameter(f"mlp.{name}_proj.weight") for name in ("gate", "up", "down")]
    for number, expert in enumerate(cut_experts(GatedMLP(*weights), router, inputs, neurons)):
        names = f"{prefix}block_sparse_moe.experts.{number}."
        # Separate copies: the file format has no shared tensors.
        yield f"{names}w1.weight", expert.gate.clone().contiguous()
        yield f"{names}w3.weight", expert.up.clone().contiguous()
        yield f"{names}w2.weight", expert.down.clone().contiguous()


def cut_experts(dense: GatedMLP, router: Tensor, inputs: Seen, neurons: int) -> Iterator[GatedMLP]:
    """Yields the experts of a layer, one by one; ``router`` is ``[E, D]``."""
    if neurons == dense.gate.shape[0]:
        yield from [dense] * len(router)
        return
    used = uses(inputs.states, router, TOP_K)  # [N, E]
    # Any expert may get a first position; a bad fit there spoils all later positions.
    common = _OF_ALL * moments(dense, inputs.states) + _OF_FIRST * moments(dense, inputs.first)
    for number in range(len(router)):
        its_own = moments(dense, inputs.states[used[:, number] > 0])
        yield cut_expert(dense, (1 - _OF_ALL) * its_own + common, neurons)
