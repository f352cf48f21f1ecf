"""GGUF files: a swarm gives the numbers of the weights that gguf-py widens, and keeps the file's bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from swarm_plugins import AutoSwarmModelForCausalLM
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import CheckpointError
from swarm_plugins.talk.turns import load_tokenizer
from swarm_plugins.testing.in_process import InProcessSwarm
from swarm_plugins.weights.published import placing

pytest.importorskip("gguf")
from gguf_models import FAMILIES, save_gguf
from published_models import check_gradients, held_bytes

CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
IDS = torch.arange(5, 17)[None]
KINDS = ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q4_0", "Q4_1", "F16", "BF16")
# One type without K in its name and one with, and one that is plain.
FAST = ("Q8_0", "Q4_K", "BF16")
SERVED = [
    pytest.param(("llama", kind), id=f"llama-{kind}", marks=[] if kind in FAST else pytest.mark.slow) for kind in KINDS
] + [
    pytest.param((family, "MXFP4" if family == "gpt-oss" else "Q8_0"), id=family)
    for family in FAMILIES
    if family != "llama"
]


class Served(NamedTuple):
    """A file on two servers, and its widened twin here."""

    file: Path
    swarm: InProcessSwarm
    remote: PreTrainedModel
    local: PreTrainedModel


@pytest.fixture(params=SERVED)
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    family, kind = request.param
    file, twin = save_gguf(family, kind, tmp_path)
    local = AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32, experts_implementation="eager").eval()
    with InProcessSwarm(file, dtype=torch.float32) as swarm:
        remote = AutoSwarmModelForCausalLM.from_pretrained(file, connection=swarm.connection, dtype=torch.float32)
        yield Served(file, swarm, remote, local)


def test_a_swarm_gives_the_numbers_of_the_widened_model(served: Served) -> None:
    with torch.no_grad():
        torch.testing.assert_close(served.remote(IDS).logits, served.local(IDS).logits, **CLOSE)
    options: dict[str, Any] = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(served.remote.generate(IDS, **options), served.local.generate(IDS, **options))
    check_gradients(served.remote, served.local, IDS, **CLOSE)
    infos = [one for name, one in Checkpoint.open(served.file).tensors.items() if ".layers." in name]
    # What is plain has the type that servers compute in; kv_b in two tensors has, too.
    halves = [one for one in infos if ".kv_b_proj.codes" in one.name]
    stored = sum(one.num_bytes if one.packing else math.prod(one.shape) * 4 for one in infos if one not in halves)
    stored += sum(one.num_bytes // 34 * 32 * 4 for one in halves)
    assert held_bytes(served.swarm) <= 1.1 * stored


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2"])
def test_transformers_reads_the_same_model_of_the_file(family: str, tmp_path: Path) -> None:
    file, twin = save_gguf(family, "Q8_0", tmp_path)
    config = AutoConfig.from_pretrained(twin)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, config=config, dtype=torch.float32)
    with InProcessSwarm(file, dtype=torch.float32) as swarm:
        remote = AutoSwarmModelForCausalLM.from_pretrained(file, connection=swarm.connection, dtype=torch.float32)
        torch.testing.assert_close(remote(IDS).logits, theirs.eval()(IDS).logits, **CLOSE)


@torch.no_grad()
def test_shards_in_a_folder_are_one_model(tmp_path: Path) -> None:
    file, twin = save_gguf("llama", "Q4_0", tmp_path, split=True)
    shards = sorted(tmp_path.glob("*.gguf"))
    assert len(shards) > 2
    assert not file.exists()
    local = AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32).eval()
    # The default device does not matter.
    with torch.device("meta"):
        assert Checkpoint.open(tmp_path).version.revision == Checkpoint.open(shards[1]).version.revision
    with InProcessSwarm(tmp_path, dtype=torch.float32) as swarm:
        remote = AutoSwarmModelForCausalLM.from_pretrained(tmp_path, connection=swarm.connection, dtype=torch.float32)
        torch.testing.assert_close(remote(IDS).logits, local(IDS).logits, **CLOSE)
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=r"has \d of \d files like toy-00001-of-"):
        Checkpoint.open(tmp_path)


@torch.no_grad()
@pytest.mark.parametrize(("family", "kind"), [("llama", "Q8_0"), ("mixtral", "Q4_0")])
def test_in_bfloat16_weights_are_repacked_and_no_further_off(
    family: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file, twin = save_gguf(family, kind, tmp_path)
    local = AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32, experts_implementation="eager").eval()
    expected, errors = local(IDS).logits, []
    for name in ("repacked", "widened"):
        if name == "widened":
            monkeypatch.setattr(placing, "repacking_of", lambda *_: None)
        with caplog.at_level("INFO"), InProcessSwarm(file, dtype=torch.bfloat16) as swarm:
            remote = AutoSwarmModelForCausalLM.from_pretrained(file, connection=swarm.connection, dtype=torch.float32)
            errors.append(float((remote(IDS).logits - expected).norm() / expected.norm()))
    assert errors[0] != errors[1]
    assert errors[0] < 1.2 * errors[1] < 0.1
    assert f"packed weights stay gguf ({kind}); a product of many rows, or for gradients, widens its own" in caplog.text
    assert "are repacked once at load, for faster products: " in caplog.text


ONE = pytest.mark.parametrize("served", [pytest.param(("llama", "Q4_K"), id="llama-Q4_K")], indirect=True)


@ONE
def test_a_lora_is_the_one_of_the_widened_model(served: Served) -> None:
    found = []
    for model in (served.remote, served.local):
        torch.manual_seed(0)
        tuned = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
        tuned(IDS, labels=IDS).loss.backward()
        found.append({name: one.grad for name, one in tuned.named_parameters() if "lora" in name})
    torch.testing.assert_close(*found, **CLOSE)


@ONE
@torch.no_grad()
def test_a_killed_server_is_replaced(served: Served) -> None:
    served.swarm.add(2, range(2, 4))
    served.remote(IDS)
    served.swarm.kill("peer1")
    torch.testing.assert_close(served.remote(IDS).logits, served.local(IDS).logits, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize(
    "served",
    [pytest.param(("llama", "Q4_K"), id="llama-Q4_K"), pytest.param(("gpt-oss", "MXFP4"), id="gpt-oss")],
    indirect=True,
)
def test_blocks_at_the_client_are_widened(served: Served) -> None:
    remote = AutoSwarmModelForCausalLM.from_pretrained(
        served.file, connection=served.swarm.connection, dtype=torch.float32, local_blocks=(1, 1)
    )
    torch.testing.assert_close(remote(IDS).logits, served.local(IDS).logits, **CLOSE)


def test_the_tokenizer_is_the_one_in_the_file(tmp_path: Path) -> None:
    file, _ = save_gguf("qwen2", "Q8_0", tmp_path)
    tokenizer = load_tokenizer(str(file), None)
    assert tokenizer.convert_ids_to_tokens([7]) == ["t7"]
