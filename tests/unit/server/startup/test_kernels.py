"""Which kernel a server forms its products with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import ConfigError
from swarm_plugins.offload.config import OffloadConfig
from swarm_plugins.server.config import DTYPES, ServeConfig
from swarm_plugins.server.startup import kernels
from swarm_plugins.server.startup.kernels import kernel_of
from swarm_plugins.server.startup.spans import SpanLoader
from swarm_plugins.testing.models import save_tiny
from swarm_plugins.weights.choice import candidates
from swarm_plugins.weights.formats.int8 import Int8Format
from swarm_plugins.weights.formats.plain import PlainFormat
from swarm_plugins.weights.names import KERNELS

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(save_tiny("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Sequence[Any], str]]:
    calls: list[tuple[Sequence[Any], str]] = []
    monkeypatch.setattr(kernels, "chosen", lambda formats, what: calls.append((formats, what)) or "halves")
    return calls


def config(checkpoint: Checkpoint, **changes: Any) -> ServeConfig:
    return ServeConfig(model=str(checkpoint.directory), **changes)


def test_the_weights_of_the_servers_blocks_are_tried(llama: Checkpoint, asked: list[tuple[Sequence[Any], str]]) -> None:
    assert kernel_of(llama, range(1, 3), config(llama), CPU) == "halves"
    [(formats, what)] = asked
    assert what == "float32"
    assert len(formats) == 2 * 5, "keys and values of the toy are too small to be arranged"
    assert all(isinstance(one, PlainFormat) and one.dtype == torch.float32 for one in formats)
    kernel_of(llama, range(1), config(llama, dtype="bfloat16"), CPU)
    assert {one.dtype for one in asked[-1][0]} == {torch.bfloat16}
    kernel_of(llama, range(1), config(llama, quantization="int8"), CPU)
    assert {type(one) for one in asked[-1][0]} == {Int8Format}
    assert kernel_of(llama, range(1), config(llama, quantization="int4"), CPU) is None
    assert kernel_of(llama, range(1), config(llama), torch.device("cuda")) is None
    assert len(asked) == 3


def test_published_rows_of_8_bits_are_tried_as_our_own(tmp_path: Path, asked: list[tuple[Sequence[Any], str]]) -> None:
    directory = save_tiny("llama", tmp_path)
    stated = json.loads((directory / "config.json").read_text())
    stated["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (directory / "config.json").write_text(json.dumps(stated))
    checkpoint = Checkpoint.open(directory)
    for dtype in ("bfloat16", "float32"):
        kernel_of(checkpoint, range(1), config(checkpoint, dtype=dtype), CPU)
    assert [type(formats[0]) for formats, _ in asked] == [Int8Format, PlainFormat]


def test_experts_on_disk_are_not_tried(tmp_path: Path, asked: list[tuple[Sequence[Any], str]]) -> None:
    mixtral = Checkpoint.open(save_tiny("mixtral", tmp_path))
    kernel_of(mixtral, range(1), config(mixtral), CPU)
    kernel_of(mixtral, range(1), config(mixtral, offload=OffloadConfig()), CPU)
    assert len(asked[1][0]) < len(asked[0][0])


def test_a_server_keeps_to_its_first_kernel(llama: Checkpoint, asked: list[tuple[Sequence[Any], str]]) -> None:
    loader = SpanLoader(checkpoint=llama, config=config(llama), device=CPU)
    for blocks in (range(2), range(2, 4)):
        loader.load(blocks).close()
    assert len(asked) == 1


def test_the_setting_knows_every_kernel() -> None:
    formats = [Int8Format((64, 64)), *(PlainFormat((64, 64), getattr(torch, name)) for name in DTYPES)]
    assert {name for one in formats for name in candidates(one)} <= set(KERNELS)


def test_a_named_kernel_is_taken(llama: Checkpoint, asked: list[tuple[Sequence[Any], str]]) -> None:
    assert kernel_of(llama, range(1), config(llama, kernel="onednn"), CPU) == "onednn"
    assert not asked
    with pytest.raises(ConfigError, match="kernel is 'plain' and device 'cuda': only CPUs have a choice"):
        kernel_of(llama, range(1), config(llama, kernel="plain"), torch.device("cuda"))
    with pytest.raises(ConfigError, match="unknown kernel 'fast'; known: plain, halves"):
        config(llama, kernel="fast")
    with pytest.raises(ConfigError, match=r"kernel is 'fbgemm' and the weights are float32: expected plain, .* leave"):
        kernel_of(llama, range(1), config(llama, kernel="fbgemm"), CPU)
    with pytest.raises(ConfigError, match="kernel is 'plain' and the weights are int4: they have no choice"):
        kernel_of(llama, range(1), config(llama, kernel="plain", quantization="int4"), CPU)
