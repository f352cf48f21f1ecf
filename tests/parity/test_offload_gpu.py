"""Experts in pinned RAM and on disk, computed with on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from offload_models import save_toy, tokens
from torch.nn import functional

from swarm_plugins.offload import OffloadConfig, load_offloaded, quantize_checkpoint
from swarm_plugins.weights.formats.int8 import Int8Format
from swarm_plugins.weights.formats.nf4 import Nf4Format
from swarm_plugins.weights.kernels.int8 import Int8Kernel
from swarm_plugins.weights.kernels.nf4 import Nf4Kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
EXPERT_BYTES = 18_432  # of the toy


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mixtral")
    save_toy("mixtral", directory)
    return directory


def load(directory: Path, **config: Any) -> Any:
    return load_offloaded(directory, OffloadConfig(**config), device="cuda")


def generate(model: Any) -> torch.Tensor:
    return model.generate(tokens(2).cuda(), max_new_tokens=16, do_sample=False, eos_token_id=None)


@pytest.mark.parametrize("ram", [0, 4, 18])
@pytest.mark.parametrize("fast", [4, 9])
@torch.no_grad()
def test_every_budget_computes_the_same_bits(directory: Path, fast: int, ram: int) -> None:
    everything = load(directory, fast_bytes=18 * EXPERT_BYTES)
    bounded = load(directory, fast_bytes=fast * EXPERT_BYTES, ram_bytes=ram * EXPERT_BYTES, prefetch=True)
    for seed in range(5):
        ids = tokens(2, seed=seed).cuda()
        assert torch.equal(bounded(ids).logits, everything(ids).logits)
    assert torch.equal(generate(bounded), generate(everything))


@torch.no_grad()
def test_what_is_in_ram_is_not_read_again(directory: Path) -> None:
    model = load(directory, fast_bytes=4 * EXPERT_BYTES, ram_bytes=18 * EXPERT_BYTES)
    for seed in range(10):
        model(tokens(2, seed=seed).cuda())
    stats = model.offload_stats()
    assert stats.bytes_read <= 18 * EXPERT_BYTES
    assert stats.misses > 18


def test_gradients_flow_through_experts_that_come_and_go(directory: Path) -> None:
    gradients = []
    for fast in (4, 18):
        model = load(directory, fast_bytes=fast * EXPERT_BYTES, ram_bytes=6 * EXPERT_BYTES)
        states = model.get_input_embeddings()(tokens(2).cuda()).detach().requires_grad_()
        model(inputs_embeds=states).logits.square().mean().backward()
        gradients.append(states.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


@torch.no_grad()
def test_converted_experts_are_converted_on_the_device(directory: Path) -> None:
    model = load(directory, fast_bytes=18 * EXPERT_BYTES, ram_bytes=6 * EXPERT_BYTES, expert_bits=8)
    exact = load(directory, fast_bytes=18 * EXPERT_BYTES)
    ids = tokens(2).cuda()
    # 8 bits a weight, three layers.
    torch.testing.assert_close(model(ids).logits, exact(ids).logits, atol=0.1, rtol=0.1)


@torch.no_grad()
def test_experts_that_become_nf4_on_the_device_compute_as_a_store_does(directory: Path, tmp_path: Path) -> None:
    quantize_checkpoint(directory, tmp_path / "nf4", expert_bits="nf4", progress=False)
    stored = load(tmp_path / "nf4", fast_bytes=18 * EXPERT_BYTES)
    # 4 means nf4 for what is quantized on its way to CUDA; quantizing starts on one stream and ends on another.
    here = load(directory, fast_bytes=4 * EXPERT_BYTES, ram_bytes=6 * EXPERT_BYTES, expert_bits=4, prefetch=True)
    stored_on_cpu = load_offloaded(tmp_path / "nf4", OffloadConfig(), device="cpu")
    here_on_cpu = load_offloaded(directory, OffloadConfig(expert_bits="nf4"), device="cpu")
    for seed in range(5):
        ids = tokens(2, seed=seed)
        # A level more or less for a weight in the middle between two.
        torch.testing.assert_close(here(ids.cuda()).logits.cpu(), here_on_cpu(ids).logits, atol=0.05, rtol=0.05)
        # The same weights: only the order of sums differs, and TF32 may be on.
        torch.testing.assert_close(stored(ids.cuda()).logits.cpu(), stored_on_cpu(ids).logits, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("rows", [1, 5, 2000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@torch.no_grad()
def test_nf4_weights_are_those_of_the_cpu(dtype: torch.dtype, rows: int) -> None:
    weight = torch.randn(192, 200, generator=torch.Generator().manual_seed(0)).to(dtype)
    matrix = Nf4Kernel(Nf4Format((192, 200)))
    expected = matrix.format.quantize(weight, is_fitted=False)
    with torch.cuda.stream(torch.cuda.Stream()):
        found = matrix.format.quantize(weight.cuda(), is_fitted=False)
        torch.cuda.current_stream().synchronize()
    torch.testing.assert_close(found["scales"].cpu(), expected["scales"])
    # A weight in the middle between two levels may go either way.
    assert int((found["codes"].cpu() != expected["codes"]).sum()) <= 4
    parts = {name: one.cuda() for name, one in expected.items()}
    inputs = torch.randn(rows, 200, generator=torch.Generator().manual_seed(1)).to(dtype)
    products = matrix.product(parts, inputs.cuda()).cpu()
    wide = functional.linear(inputs.float(), matrix.widen(expected, torch.float32))
    assert products.dtype == dtype
    # Weights and results in the type of the rows.
    assert float((products.float() - wide).norm() / wide.norm()) < (1e-2 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("shape", [(192, 256), (70, 96), (33, 50)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@torch.no_grad()
def test_products_of_8_bits_are_those_of_the_cpu(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    matrix = Int8Kernel(Int8Format(shape))
    parts = matrix.format.quantize(torch.randn(shape, generator=torch.Generator().manual_seed(0)), is_fitted=False)
    rows = torch.randn(7, shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    rows[2, 5] = 40.0
    there = {name: one.cuda() for name, one in parts.items()}
    found, expected = matrix.product(there, rows.cuda()).cpu(), matrix.product(parts, rows.float())
    assert found.dtype == dtype
    # Activations of 8 bits, where the CPU has 16.
    assert float((found.float() - expected).norm() / expected.norm()) < 0.02
    assert matrix.product(there, rows[:0].cuda()).shape == (0, shape[0])


def test_gradients_flow_through_nf4_and_8_bits(directory: Path) -> None:
    for bits in ("nf4", 8):
        model = load(directory, fast_bytes=9 * EXPERT_BYTES, expert_bits=bits)
        states = model.get_input_embeddings()(tokens(2).cuda()).detach().requires_grad_()
        model(inputs_embeds=states).logits.square().mean().backward()
        assert states.grad is not None
        assert bool(states.grad.isfinite().all())
        assert float(states.grad.abs().max()) > 0
