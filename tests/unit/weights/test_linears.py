"""What PEFT and DDP make of a layer in few bits: they see a wide weight without values, never the codes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from swarm_plugins.backbone.peft_parts import follow_injection
from swarm_plugins.checkpoint import keep_from_ddp
from swarm_plugins.errors import UnsupportedError
from swarm_plugins.weights.formats.scaled import ScaledFormat
from swarm_plugins.weights.linears import PackedLinear, packed

SIZE = 64
FP8 = torch.float8_e4m3fn


def int8() -> PackedLinear:
    torch.manual_seed(0)
    return packed(nn.Linear(SIZE, SIZE).requires_grad_(False), 8)


def fp8() -> PackedLinear:
    torch.manual_seed(0)
    scales = torch.full((4, 4), 2.0**-12).to(torch.float8_e8m0fnu)
    form = ScaledFormat((SIZE, SIZE), (16, 16), FP8, scales.dtype, (4, 4))
    codes = (torch.randn(SIZE, SIZE) * 400).clamp(-448, 448).to(FP8)
    return PackedLinear(form, {"codes": codes, "scales": scales}, None, torch.device("cpu"))


def wide(layer: PackedLinear) -> nn.Linear:
    twin = nn.Linear(SIZE, SIZE, bias=layer.bias is not None).requires_grad_(False)
    twin.weight.copy_(layer.widened())
    if layer.bias is not None:
        twin.bias.copy_(layer.bias)
    return twin


def adapted(layer: nn.Linear, config: Any, **options: Any) -> PeftModel:
    """An adapter with random numbers on a layer; the model has another one, as every model has."""
    torch.manual_seed(1)
    model: Any = get_peft_model(nn.Sequential(layer, nn.LayerNorm(SIZE)), copy.deepcopy(config), **options)
    torch.manual_seed(2)
    for one in model.parameters():
        if one.requires_grad:
            nn.init.normal_(one, std=0.1)
    return model  # type: ignore[no-any-return]


def config(method: str, **options: Any) -> Any:
    return getattr(peft, f"{method}Config")(target_modules=["0"], **options)


WORK = {
    "lora": config("Lora", r=4, init_lora_weights="gaussian"),
    "rslora": config("Lora", r=4, use_rslora=True),
    "ia3": config("IA3", feedforward_modules=[]),
    "ia3-input": config("IA3", feedforward_modules=["0"]),
    "adalora": config("AdaLora", init_r=4, total_step=10),
    "loha": config("LoHa", r=4),
    "lokr": config("LoKr", r=4),
    "vera": config("Vera", r=4),
    "randlora": config("RandLora", r=4),
    "oft": config("OFT", r=8, oft_block_size=0),
    "miss": config("Miss", r=4),
    "fourierft": config("FourierFT", n_frequency=8),
    "road": config("Road"),
}
READ_WEIGHTS = {
    "dora": config("Lora", r=4, use_dora=True),
    "pissa": config("Lora", r=4, init_lora_weights="pissa"),
    "olora": config("Lora", r=4, init_lora_weights="olora"),
    "hra": config("HRA", r=4),
    "bat": config("Miss", r=4, init_weights="bat"),
    "hira": config("Hira", r=4),
    "delora": config("Delora", r=4),
    "shira": config("Shira", r=4),
    "osf": config("OSF"),
    "peanut": config("Peanut"),
}
LAYERS = pytest.mark.parametrize("layer", [int8, fp8])


@LAYERS
@pytest.mark.parametrize("is_cast", [True, False], ids=["cast", "not-cast"])
@pytest.mark.parametrize("method", WORK)
def test_a_method_that_adds_to_products_gives_the_numbers_of_the_wide_layer(
    method: str, is_cast: bool, layer: Callable[[], PackedLinear]
) -> None:
    made = layer()
    rows = torch.randn(3, SIZE)
    few, many = (adapted(one, WORK[method], autocast_adapter_dtype=is_cast) for one in (made, wide(made)))
    torch.testing.assert_close(few(rows), many(rows), rtol=1e-3, atol=1e-3)


@LAYERS
@pytest.mark.parametrize("method", READ_WEIGHTS)
def test_a_method_that_reads_weights_is_refused(method: str, layer: Callable[[], PackedLinear]) -> None:
    follow_injection()  # as a model on a swarm in the same process does; it changes PEFT's DoRA
    with pytest.raises(UnsupportedError, match=r"in few bits was read or written .* use LoRA, IA3, VeRA or LoHa"):
        adapted(layer(), READ_WEIGHTS[method])(torch.randn(3, SIZE))


@LAYERS
@pytest.mark.parametrize("is_safe", [True, False])
def test_an_adapter_is_not_merged_into_codes(is_safe: bool, layer: Callable[[], PackedLinear]) -> None:
    made = layer()
    before = made.widened()
    with pytest.raises(UnsupportedError, match=r"in few bits .* Merging"):
        adapted(made, WORK["lora"]).merge_and_unload(safe_merge=is_safe)  # type: ignore[operator]
    assert torch.equal(made.widened(), before)


def test_codes_are_not_trained() -> None:
    layer = int8()
    layer.weight.requires_grad_(False).requires_grad = False
    with pytest.raises(UnsupportedError, match=r"in few bits was read or written \(requires_grad\)"):
        layer.weight.requires_grad = True
    with pytest.raises(UnsupportedError, match=r"in few bits was read or written \(requires_grad\)"):
        get_peft_model(
            nn.Sequential(int8(), nn.Linear(SIZE, SIZE)),  # type: ignore[arg-type]
            LoraConfig(target_modules=["1"], modules_to_save=["0"]),
        )


def test_the_weight_follows_casts_and_copies_and_is_not_saved() -> None:
    layer = int8().to(torch.bfloat16)
    assert layer.weight.dtype == copy.deepcopy(layer).weight.dtype == torch.bfloat16
    assert layer.weight_codes.dtype == torch.int8
    assert sum(one.nbytes for one in (*layer.parameters(), *layer.buffers())) < 1.1 * SIZE * SIZE
    assert set(layer.state_dict()) == {"weight_codes", "weight_scales", "bias"}
    other = int8()
    other.weight_codes.zero_()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.weight_codes, layer.weight_codes)


@pytest.fixture
def alone(tmp_path: Any) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@LAYERS
def test_ddp_sends_no_codes(layer: Callable[[], PackedLinear]) -> None:
    inner = nn.Sequential(layer(), nn.LayerNorm(SIZE))
    keep_from_ddp(inner)
    tuned = get_peft_model(inner, LoraConfig(target_modules=["0"]))  # type: ignore[arg-type]
    trained = DistributedDataParallel(tuned)
    assert not trained.modules_buffers, "would be sent before each forward pass"
    trained(torch.randn(3, SIZE)).sum().backward()
    assert trained.module.base_model.model[0].lora_B["default"].weight.grad is not None
