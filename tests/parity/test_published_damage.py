"""Published checkpoints that say or hold nonsense: one sentence, from headers where these suffice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from swarm_plugins.blocks import load_span
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import CheckpointError, ConfigError, SwarmError, UnsupportedError
from swarm_plugins.offload import OffloadConfig, load_offloaded
from swarm_plugins.offload.model.moe_checkpoint import MoeCheckpoint
from swarm_plugins.server.config import ServeConfig
from swarm_plugins.server.startup.capacity import blocks_that_fit
from swarm_plugins.server.startup.weights import hosted_weights
from swarm_plugins.testing.models import save_tiny
from swarm_plugins.verification.local_blocks import Kind, LocalBlocks, UncheckableError
from swarm_plugins.weights.formats.scaled import ScaledFormat

pytest.importorskip("compressed_tensors", exc_type=ImportError)
from published_models import save_fused_fp8, save_mxfp4, save_published

QUERY = "model.layers.0.self_attn.q_proj."
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def save(way: str) -> Path:
        if way not in made:
            place = tmp_path_factory.mktemp(way)
            made[way] = (save_mxfp4(place) if way == "mxfp4" else save_published(way, "llama", place))[0]
        return made[way]

    return save


def load(directory: Path, **options: Any) -> None:
    load_span(Checkpoint.open(directory), range(1), dtype=torch.float32, **options)


def changed(source: Path, target: Path, change: Callable[[Tensors], object], **settings: Any) -> Path:
    """A copy with other tensors, and other settings of its quantization; None leaves one out."""
    target.mkdir(exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"].update(settings)
    (target / "config.json").write_text(json.dumps(config))
    return target


def fill(name: str, value: float) -> Callable[[Tensors], object]:
    def change(tensors: Tensors) -> None:
        flat = tensors[name].flatten().float()
        flat[-1] = value
        tensors[name] = flat.to(tensors[name].dtype).reshape(tensors[name].shape)

    return change


def cut(name: str) -> Callable[[Tensors], object]:
    def change(tensors: Tensors) -> None:
        tensors[name] = tensors[name][:-1].clone()

    return change


NAN, INF = float("nan"), float("inf")
STATE = f"{QUERY}weight.quant_state.bitsandbytes__nf4"
THREE_BITS = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 3, "type": "int"}}}}
EXPERTS = "model.layers.0.mlp.experts.down_proj"
VALUES = [
    pytest.param("fp8", fill(f"{QUERY}weight_scale_inv", 0.0), "its scales hold a zero", id="fp8-zero"),
    pytest.param("fp8", fill(f"{QUERY}weight_scale_inv", NAN), "its scales hold NaN or inf", id="fp8-nan"),
    pytest.param("fp8", fill(f"{QUERY}weight", NAN), "its codes hold NaN", id="fp8-nan-code"),
    pytest.param("int4-groups", fill(f"{QUERY}weight_scale", INF), "its scales hold NaN or inf", id="int4-inf"),
    pytest.param("int4-groups", fill(f"{QUERY}weight_shape", 31), r"said to be \[32, 31\]", id="int4-shape"),
    pytest.param("nvfp4", fill(f"{QUERY}weight_global_scale", 0.0), "its global_scale hold a zero", id="nvfp4-zero"),
    pytest.param("gptq-order", fill(f"{QUERY}g_idx", 4), "groups beyond the 4 that it has", id="gptq-beyond"),
    pytest.param("gptq-order", fill(f"{QUERY}g_idx", -1), "groups beyond the 4 that it has", id="gptq-negative"),
    pytest.param("awq", fill(f"{QUERY}scales", 0.0), "its scales hold a zero", id="awq-zero"),
    pytest.param("bnb-nf4", fill(f"{QUERY}weight.absmax", INF), "its maxima hold NaN or inf", id="bnb-inf"),
    pytest.param("bnb-int8", fill(f"{QUERY}SCB", NAN), "its scales hold NaN or inf", id="bnb-int8-nan"),
    pytest.param("bnb-nf4", fill(STATE, 0), "quant_state cannot be read", id="bnb-state"),
    pytest.param("mxfp4", fill(f"{EXPERTS}_scales", 255), "its scales hold NaN", id="mxfp4-nan"),
]
SHAPES = [
    pytest.param("fp8", cut(f"{QUERY}weight_scale_inv"), r"scales have the shape \[3, 4\], .* need \[4, 4\]", id="fp8"),
    pytest.param("float-channel", cut(f"{QUERY}weight_scale"), r"have the shape \[31, 1\]", id="channel"),
    pytest.param("int4-groups", cut(f"{QUERY}weight_scale"), r"is \[31, 4\] of .* needs \[32, 4\]", id="int4"),
    pytest.param("gptq", cut(f"{QUERY}qzeros"), r"is \[3, 4\] of .* needs \[4, 4\]", id="gptq"),
    pytest.param("bnb-nf4", cut(f"{QUERY}weight.absmax"), r"is \[15\] of .* needs \[16\]", id="bnb"),
    pytest.param("mxfp4", cut(f"{EXPERTS}_scales"), r"is \[5, 64, 2\] of .* needs \[6, 64, 2\]", id="mxfp4"),
    pytest.param("fp8", lambda tensors: tensors.pop(f"{QUERY}weight_scale_inv"), "without scales", id="no-scales"),
    pytest.param("awq", lambda tensors: tensors.pop(f"{QUERY}qzeros"), "it has no zeros", id="no-zeros"),
    pytest.param("int4-groups", lambda tensors: tensors.pop(f"{QUERY}weight_shape"), "it has no shape", id="no-shape"),
    pytest.param(
        "bnb-nf4", lambda tensors: tensors.update({STATE: tensors[STATE].float()}), "expected bytes", id="state"
    ),
]


@pytest.mark.parametrize(("way", "change", "message"), VALUES)
def test_numbers_that_make_nonsense_are_refused(
    way: str, change: Callable[[Tensors], object], message: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(changed(saved(way), tmp_path, change))


@pytest.mark.parametrize(("way", "change", "message"), SHAPES)
def test_headers_that_do_not_fit_are_refused_before_weights_are_read(
    way: str,
    change: Callable[[Tensors], object],
    message: str,
    saved: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Checkpoint, "read", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(CheckpointError, match=message):
        load(changed(saved(way), tmp_path, change))


def test_experts_that_are_there_twice_are_refused(saved: Callable[[str], Path], tmp_path: Path) -> None:
    def double(tensors: Tensors) -> None:
        # As a model without its head would call them.
        names = [name for name in tensors if name.startswith(f"{EXPERTS}_")]
        tensors.update({name.removeprefix("model."): tensors[name].clone() for name in names})

    with pytest.raises(CheckpointError, match=rf" and {EXPERTS} in .* are both {EXPERTS}: fetch it again"):
        MoeCheckpoint.open(changed(saved("mxfp4"), tmp_path, double))


@pytest.mark.parametrize(
    ("way", "settings", "message"),
    [
        pytest.param("fp8", {"quant_method": "aqlm"}, "'aqlm' is not known: known are awq, bitsandbytes", id="method"),
        pytest.param("fp8", {"quant_method": None}, "'None' is not known", id="no-method"),
        pytest.param("fp8", {"weight_block_size": "all"}, "cannot be read", id="block"),
        pytest.param("int4-groups", {"format": "marlin-24"}, "'marlin-24' .* is not known", id="format"),
        pytest.param("int4-groups", {"config_groups": 3}, "cannot be read", id="groups"),
        pytest.param("int4-groups", {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config", id="sparse"),
        pytest.param("gptq", {"checkpoint_format": "marlin"}, "'marlin' .* known are gptq, gptq_v2", id="gptq"),
        pytest.param("gptq", {"format": "marlin"}, "'marlin' .* known are gptq, gptq_v2", id="gptq-format"),
        pytest.param("gptq", {"bits": 3}, "of 3 bits .* known are .* of 2, 4, 8 bits", id="gptq-bits"),
        pytest.param("awq", {"version": "gemv"}, "'gemv' .* known is 'gemm'", id="awq"),
        pytest.param("awq", {"version": None, "format": "llm-awq"}, "'llm-awq' .* known is 'gemm'", id="awq-format"),
        pytest.param("awq", {"bits": 8}, "of 8 bits .* known is 'gemm' of 4 bits", id="awq-bits"),
        pytest.param("int4-groups", THREE_BITS, "num_bits=3.* pack-quantized of 2, 4, 8 bits", id="packed-bits"),
        pytest.param("bnb-nf4", {"bnb_4bit_quant_type": "nf3"}, "'nf3' are not known", id="bnb"),
    ],
)
def test_what_is_not_known_is_refused_with_what_is(
    way: str, settings: dict[str, Any], message: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        load(changed(saved(way), tmp_path, lambda _: None, **settings))


@pytest.mark.parametrize(
    ("way", "settings", "message"),
    [
        pytest.param("gptq", {"group_size": 7}, "not a multiple of the group size 7", id="size"),
        pytest.param("gptq", {"group_size": 0}, "not a multiple of the group size 0", id="zero"),
        pytest.param("fp8", {"weight_block_size": [0, 8]}, "which holds nothing", id="block"),
    ],
)
def test_settings_that_do_not_fit_the_weights_are_refused(
    way: str, settings: dict[str, Any], message: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(changed(saved(way), tmp_path, lambda _: None, **settings))


def test_stacked_codes_need_scales(tmp_path: Path) -> None:
    source, _ = save_fused_fp8(tmp_path)
    name = "model.layers.0.mlp.experts.down_proj_scale_inv"
    directory = changed(source, tmp_path / "without", lambda tensors: tensors.pop(name))
    with pytest.raises(
        CheckpointError, match=r"experts\.down_proj in .* is stored as torch\.float8_e4m3fn without scales"
    ):
        load(directory)
    directory = changed(source, tmp_path / "cut", lambda tensors: tensors.update({name: tensors[name][:, :1].clone()}))
    with pytest.raises(CheckpointError, match=r"down_proj in .*: its scales have the shape"):
        load(directory)


def test_what_is_packed_is_not_quantized_again(saved: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"quantization is 'int8' and .* is published as fp8: leave"):
        load(saved("fp8"), quantization="int8")


def test_servers_announce_the_format_and_count_its_bytes(saved: Callable[[str], Path]) -> None:
    checkpoint, config = Checkpoint.open(saved("gptq")), ServeConfig(model="toy", dtype="float32")
    assert hosted_weights(checkpoint, config).quantization == "gptq-int4"
    total = sum(info.num_bytes for info in checkpoint.tensors.values())
    room = config.set_aside_bytes + 2 * total
    assert blocks_that_fit(checkpoint, config, available_bytes=int(room / 0.9)) == 4


def test_a_verifier_computes_the_format_that_a_server_names(saved: Callable[[str], Path]) -> None:
    blocks = LocalBlocks(lambda: Checkpoint.open(saved("fp8")), limit_bytes=1 << 30)
    assert blocks._span(range(1), Kind("float32", "fp8")).spec.blocks == range(1)
    for quantization in ("none", "mxfp4"):
        with pytest.raises(UncheckableError, match="is published as fp8, the server says"):
            blocks._span(range(1), Kind("float32", quantization))
    with pytest.raises(SwarmError, match="cannot be computed here"):
        _ = Kind("float32", "fp9").torch_dtype


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_config_that_packs_no_weights_is_of_a_wide_checkpoint(family: str, tmp_path: Path) -> None:
    save_tiny(family, tmp_path / "wide")
    cache = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8}}
    config = json.loads((tmp_path / "wide" / "config.json").read_text())
    (tmp_path / "wide" / "config.json").write_text(json.dumps({**config, "quantization_config": cache}))

    checkpoint = Checkpoint.open(tmp_path / "wide")
    announced = hosted_weights(checkpoint, ServeConfig(model="toy", dtype="float32")).quantization
    assert announced == "none"
    blocks = LocalBlocks(lambda: checkpoint, limit_bytes=1 << 30)
    assert blocks._span(range(1), Kind("float32", announced)).spec.blocks == range(1)
    if family == "mixtral":
        load_offloaded(tmp_path / "wide", OffloadConfig(fast_bytes=1 << 22), device="cpu")


def test_the_last_blocks_may_be_cut() -> None:
    scales = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    format = ScaledFormat((3, 5), (2, 4), torch.float8_e4m3fn, torch.float32, (2, 2))
    wide = format.widen({"codes": torch.ones(3, 5).to(torch.float8_e4m3fn), "scales": scales}, torch.float32)
    assert wide.tolist() == [[1, 1, 1, 1, 2], [1, 1, 1, 1, 2], [3, 3, 3, 3, 4]]
