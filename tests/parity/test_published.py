"""Checkpoints as they are published: a swarm gives the numbers of the widened model, and keeps the file's bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lies_kit import finish_checks, verifier_of
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarm_plugins import AutoSwarmModelForCausalLM, SwarmConfig
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.testing.in_process import InProcessSwarm
from swarm_plugins.verification import Quarantine
from swarm_plugins.weights.linears import PackedLinear
from swarm_plugins.weights.published.weights import Published

pytest.importorskip("compressed_tensors", exc_type=ImportError)
from published_models import (
    SAID_OTHERWISE,
    WAYS,
    check_gradients,
    held_bytes,
    save_fused_fp8,
    save_mixed,
    save_mxfp4,
    save_published,
)

# Sums of an expert's products run in another order.
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
IDS = torch.arange(5, 17)[None]
DENSE = [pytest.param((way, "llama"), id=way) for way in WAYS if way not in SAID_OTHERWISE]
MIXTURES = [
    pytest.param((way, family), id=f"{way}-{family}")
    for family in ("mixtral", "deepseek_v3")
    for way in ("fp8", "int4-groups", "gptq-order")
]


class Served(NamedTuple):
    """A published checkpoint on two servers, and its widened twin here."""

    directory: Path
    swarm: InProcessSwarm
    remote: PreTrainedModel
    local: PreTrainedModel


SPECIAL = [("mxfp4", "gpt_oss"), ("mixed", "llama"), ("fp8-fused", "qwen3_moe")]


@pytest.fixture(params=[*DENSE, *MIXTURES, *(pytest.param(one, id="-".join(one)) for one in SPECIAL)])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    way, family = request.param
    special = {"mxfp4": save_mxfp4, "mixed": save_mixed, "fp8-fused": save_fused_fp8}
    directory, twin = special[way](tmp_path) if way in special else save_published(way, family, tmp_path)
    local = AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32, experts_implementation="eager").eval()
    with InProcessSwarm(directory, dtype=torch.float32) as swarm:
        remote = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection, dtype=torch.float32)
        yield Served(directory, swarm, remote, local)


@pytest.mark.parametrize("way", WAYS)
def test_widened_weights_have_the_bits_of_their_library(way: str, tmp_path: Path) -> None:
    directory, twin = save_published(way, "llama", tmp_path)
    published = Published.of(Checkpoint.open(directory))
    assert published is not None
    expected = load_file(twin / "model.safetensors")
    groups = published.groups(published.checkpoint.tensors)
    assert len(groups) == 28
    for plain, group in groups.items():
        rows, columns = expected[plain].shape
        weight = published.weight(plain, group, (rows, columns))
        # The default device does not matter.
        with torch.device("meta"):
            [parts] = published.read([weight])
        assert torch.equal(weight.format.widen(parts, torch.float32), expected[plain])


def test_a_swarm_gives_the_numbers_of_the_widened_model(served: Served) -> None:
    with torch.no_grad():
        torch.testing.assert_close(served.remote(IDS).logits, served.local(IDS).logits, **CLOSE)
    found = served.remote.generate(IDS, max_new_tokens=4, do_sample=False)
    assert torch.equal(found, served.local.generate(IDS, max_new_tokens=4, do_sample=False))
    check_gradients(served.remote, served.local, IDS, **CLOSE)
    _check_memory(served)


def _check_memory(served: Served) -> None:
    with safe_open(served.directory / "model.safetensors", "pt") as file:
        names = [name for name in file.keys() if ".layers." in name]  # noqa: SIM118
        stored = sum(file.get_tensor(name).nbytes for name in names)
    assert held_bytes(served.swarm) <= 1.1 * stored


@pytest.mark.parametrize("served", [pytest.param(("fp8", "llama"), id="fp8")], indirect=True)
def test_a_lora_trained_on_packed_blocks_is_the_one_of_the_widened_ones(served: Served) -> None:
    found = []
    for model in (served.remote, served.local):
        torch.manual_seed(0)
        tuned = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
        optimizer = torch.optim.SGD([one for one in tuned.parameters() if one.requires_grad], lr=0.1)
        tuned(IDS, labels=IDS).loss.backward()
        optimizer.step()
        found.append({name: one.detach() for name, one in tuned.named_parameters() if "lora" in name})
    torch.testing.assert_close(*found, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("served", [pytest.param(("fp8", "llama"), id="fp8")], indirect=True)
def test_a_killed_server_is_replaced(served: Served) -> None:
    served.swarm.add(2, range(2, 4))
    served.remote(IDS)
    served.swarm.kill("peer1")
    torch.testing.assert_close(served.remote(IDS).logits, served.local(IDS).logits, **CLOSE)


@pytest.mark.parametrize("served", [pytest.param(("fp8", "llama"), id="fp8")], indirect=True)
def test_linear_layers_keep_their_codes(served: Served) -> None:
    model = served.swarm.services["peer0"].runner._spans[0].model  # type: ignore[attr-defined]
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    assert {module.weight_codes.dtype for module in packed} == {torch.float8_e4m3fn}
    assert len(packed) == 14


@torch.no_grad()
@pytest.mark.parametrize(
    "served",
    [
        pytest.param(("fp8", "mixtral"), id="fp8"),
        pytest.param(("mxfp4", "gpt_oss"), id="mxfp4"),
        pytest.param(("fp8-fused", "qwen3_moe"), id="fp8-fused"),
    ],
    indirect=True,
)
def test_blocks_at_the_client_are_widened(served: Served) -> None:
    remote = AutoSwarmModelForCausalLM.from_pretrained(
        served.directory, connection=served.swarm.connection, dtype=torch.float32, local_blocks=(1, 1)
    )
    torch.testing.assert_close(remote(IDS).logits, served.local(IDS).logits, **CLOSE)


def test_honest_servers_of_packed_blocks_are_checked_and_not_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SWARM_PLUGINS_CACHE", str(tmp_path / "cache"))
    directory, _ = save_published("fp8", "llama", tmp_path)
    with InProcessSwarm(directory, dtype=torch.float32, config=SwarmConfig(verify="on", micro_batches=1)) as swarm:
        remote = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)
        verifier_of(remote).checker.chance = lambda: 0.0
        with torch.no_grad():
            remote(IDS)
        finish_checks(remote)
        assert set(verifier_of(remote).checker.checked) == set(swarm.peers)
    assert not Quarantine(tmp_path / "cache" / "quarantine").peers()
    assert "failed (failure" not in caplog.text
