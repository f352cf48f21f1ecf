"""Norms that DoRA starts from: each is a part of its own, and those that are kept have a bound."""

from __future__ import annotations

import pytest
import torch
from blocks_kit import BLOCKS, WIDTH, Pair

from swarm_plugins.adapter_spec import AdapterSpec, PeftLayer, PeftPart
from swarm_plugins.block_io import LoadedAdapter
from swarm_plugins.blocks.adapters import norms
from swarm_plugins.server.hosted import HostedSpans


def test_a_server_computes_one_norm_in_each_part(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[object] = []
    original = norms.wide_weight
    monkeypatch.setattr(norms, "wide_weight", lambda module: computed.append(module) or original(module))
    options, names = (("use_dora", True),), ("lora_A.weight", "lora_B.weight")
    layers = tuple(
        PeftLayer(block=block, module="self_attn.q_proj", options=options, names=names, places=(0, 1))
        for block in BLOCKS
    )
    part = PeftPart(method="LORA", shapes=((4, WIDTH), (WIDTH, 4)), layers=layers)
    tensors = tuple(torch.ones(shape) for shape in part.shapes)
    adapter = LoadedAdapter(spec=AdapterSpec(modules=(), peft=part), tensors=tensors)
    normed = list(norms.normed_layers(adapter))
    assert [len(computed) for _ in HostedSpans(llama.span).weight_norms(normed)] == [1, 2, 3]
    assert computed == [llama.span.module(block, "self_attn.q_proj") for block in BLOCKS]
    assert [one.norm_bytes for one in normed] == [WIDTH * 4] * 4


def test_kept_norms_have_a_bound_and_the_last_used_stay() -> None:
    kept = norms.KeptNorms(3 * 128)
    for key in "abca":
        if kept.get(key) is None:
            kept.put(key, torch.zeros(32), ())
    kept.put("d", torch.zeros(32), ())
    kept.put("d", torch.ones(32), ())
    found = {key: kept.get(key) for key in "abcd"}
    assert [key for key, norm in found.items() if norm is not None] == ["a", "c", "d"]
    kept.put("e", torch.zeros(4 * 32), ())
    assert all(kept.get(key) is None for key in "abcde")
