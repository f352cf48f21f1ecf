"""Experts in few bits: buffers of all an expert's tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from swarm_plugins.offload.formats.experts import QuantizedFormat, QuantizedOnReading, expert_format
from swarm_plugins.offload.interfaces import BufferLayout
from swarm_plugins.weights.widths import NF4, Width

CPU = torch.device("cpu")
PLAIN = BufferLayout.of(
    [
        ("gate_up_proj", torch.float32, (128, 70)),
        ("gate_up_proj_bias", torch.float32, (128,)),
        ("down_proj", torch.bfloat16, (70, 64)),
    ]
)


def expert(layout: BufferLayout) -> tuple[Tensor, dict[str, Tensor]]:
    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    views = layout.views(buffer)
    for one in views.values():
        one.copy_(torch.randn(one.shape))
    return buffer, views


@pytest.mark.parametrize("bits", [8, 4, "nf4", 3, 2])
def test_an_expert_quantized_beforehand_or_as_it_is_read_multiplies_alike(bits: Width) -> None:
    plain, tensors = expert(PLAIN)
    ready, reading = QuantizedFormat(PLAIN, bits, CPU), QuantizedOnReading(PLAIN, bits, CPU)
    assert reading.stored is PLAIN
    stored = torch.zeros(ready.stored.num_bytes, dtype=torch.uint8)
    for name, view in ready.stored.views(stored).items():
        view.copy_(ready.quantize(tensors, is_fitted=False)[name])
    buffers = []
    for one, source in ((ready, stored), (reading, plain)):
        buffer = torch.zeros(one.computed.num_bytes, dtype=torch.uint8)
        one.convert(source, buffer)
        buffers.append(buffer)
    assert torch.equal(*buffers)
    views = ready.computed.views(buffers[0])
    assert torch.equal(views["gate_up_proj_bias"], tensors["gate_up_proj_bias"])
    rows = torch.randn(3, 70)
    expected = functional.linear(rows, tensors["gate_up_proj"])
    # The widest error of a width, 2 bits rounded to the nearest; a wrong tensor is off by 1.4.
    assert float((ready.linear(views, "gate_up_proj", rows) - expected).norm() / expected.norm()) < 0.45


def test_biases_stay_exact_where_weights_are_halved() -> None:
    stored, tensors = expert(PLAIN)
    form = expert_format(PLAIN, 16, torch.float32, CPU, is_transposed=False)
    computed = torch.zeros(form.computed.num_bytes, dtype=torch.uint8)
    form.convert(stored, computed)
    views = form.computed.views(computed)
    assert torch.equal(views["gate_up_proj"], tensors["gate_up_proj"].bfloat16())
    assert torch.equal(form.bias(views, "gate_up_proj", torch.float32), tensors["gate_up_proj_bias"])


def test_nothing_is_converted_where_the_disk_holds_what_is_multiplied_with() -> None:
    for bits in (8, 4, NF4, 3, 2):
        ready = QuantizedFormat(PLAIN, bits, torch.device("cuda"))
        assert ready.computed is ready.stored


def test_transposed_weights_are_turned() -> None:
    _, tensors = expert(PLAIN)
    lying = BufferLayout.of([(one.name, one.dtype, one.shape[::-1]) for one in PLAIN.tensors])
    buffer = torch.zeros(lying.num_bytes, dtype=torch.uint8)
    for name, view in lying.views(buffer).items():
        view.copy_(tensors[name].T if tensors[name].dim() == 2 else tensors[name])
    turned, straight = QuantizedOnReading(lying, 8, CPU, is_transposed=True), QuantizedFormat(PLAIN, 8, CPU)
    found = torch.zeros(turned.computed.num_bytes, dtype=torch.uint8)
    turned.convert(buffer, found)
    expected = torch.zeros_like(found)
    straight.convert_tensors(straight.quantize(tensors, is_fitted=False), expected)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("bits", "device", "quantized_alike"),
    [(4, "cuda", "nf4"), (4, "cpu", 4), ("nf4", "cpu", "nf4"), (3, "cuda", 3), (8, "cuda", 8)],
)
def test_four_bits_on_their_way_to_cuda_are_nf4(bits: Width, device: str, quantized_alike: Width) -> None:
    place = torch.device(device)
    found = expert_format(PLAIN, bits, torch.float32, place, is_transposed=False)
    assert found.computed == QuantizedFormat(PLAIN, quantized_alike, place).computed
    # What a store holds stays what it is.
    if bits == 4:
        assert QuantizedFormat(PLAIN, 4, place).stored == QuantizedFormat(PLAIN, 4, CPU).stored
