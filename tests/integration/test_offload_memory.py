"""A model several times larger than its memory limit."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from recipes.benchmarks.offload.model import write_random_moe

MB = 10**6
LIMIT_BYTES = 130 * MB
"""Private memory on top of what Python and its libraries take. An Intel Xeon with AMX needs 86 MB, with AVX2 58 MB."""
TRAINING_LIMIT_BYTES = 200 * MB
"""Also holds weights outside experts in float32 and gradients. The same Xeon needs 132 MB, with AVX2 125 MB."""
FAST_BYTES = 40 * MB

# How much memory MKL and oneDNN take for themselves depends on the processor. A small model without offloading does the
# same work first, and the limit is set relative to the memory in use after it. An allocation that must fail shows that
# the limit is in force.
LOAD = """
import ctypes, gc, json, resource, sys
import torch
from pathlib import Path
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from swarm_plugins import OffloadConfig, load_offloaded

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))

large, small, limit, fast = *sys.argv[1:3], int(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(1)
"""

LIMIT = """
work(AutoModelForCausalLM.from_pretrained(small, dtype=dtype))
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
before = status("RssAnon")
top = status("VmData") + limit
resource.setrlimit(resource.RLIMIT_DATA, (top, top))
try:
    torch.empty(2 * limit, dtype=torch.uint8)
    refused = False
except RuntimeError:
    refused = True
model = load_offloaded(large, OffloadConfig(fast_bytes=fast), device="cpu", dtype=dtype)
found = work(model)
"""

GENERATE = """
dtype = torch.bfloat16

def work(model):
    ids = torch.arange(1, 25).reshape(1, -1)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    return {"new": out.shape[1] - ids.shape[1]}
"""

# A LoRA on attention and on all experts. A hundred tokens go to most experts of a layer.
# In float32: for bfloat16, oneDNN compiles and keeps a kernel for each number of rows that an expert gets, which takes
# hundreds of megabytes.
TRAIN = """
dtype = torch.float32

def work(model):
    torch.manual_seed(0)
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    tuned = get_peft_model(model, LoraConfig(r=1, target_modules=["q_proj", "v_proj"], target_parameters=targets))
    trained = [parameter for parameter in tuned.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    ids = torch.arange(1, 101).reshape(1, -1)
    losses = []
    for _ in range(3):
        loss = tuned(input_ids=ids, labels=ids).loss
        loss.backward()
        lacking = sum(parameter.grad is None for parameter in trained)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "lacking": lacking}
"""

REPORT = """
stats = model.offload_stats()
found |= {"refused": refused, "grown": status("RssAnon") - before, "read": stats.bytes_read}
print(json.dumps(found))
"""


def write_olmoe(directory: Path, layers: int, experts: int) -> Path:
    config = AutoConfig.for_model(
        "olmoe",
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        num_experts=experts,
        num_experts_per_tok=2,
    )
    return write_random_moe(config, directory)


@pytest.fixture
def large() -> Iterator[Path]:
    """805 MB of experts in bfloat16; not in pytest's own folders, which are kept for three runs."""
    with tempfile.TemporaryDirectory() as folder:
        yield write_olmoe(Path(folder) / "model", layers=8, experts=32)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_olmoe(tmp_path / "model", layers=1, experts=2)


def run_under_limit(large: Path, small: Path, program: str, limit: int) -> dict[str, Any]:
    sizes = [str(limit), str(FAST_BYTES)]
    arguments = [sys.executable, "-c", LOAD + program + LIMIT + REPORT, str(large), str(small), *sizes]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["refused"]
    assert found["grown"] < limit
    return found


def test_a_model_six_times_the_memory_limit_generates(large: Path, small: Path) -> None:
    size = sum(file.stat().st_size for file in large.glob("*.safetensors"))
    assert size > 6 * LIMIT_BYTES
    found = run_under_limit(large, small, GENERATE, LIMIT_BYTES)
    assert found["new"] == 4
    # Far more than fits went through the memory.
    assert found["read"] > 5 * FAST_BYTES


def test_an_adapter_on_experts_eight_times_the_memory_limit_is_trained(large: Path, small: Path) -> None:
    found = run_under_limit(large, small, TRAIN, TRAINING_LIMIT_BYTES)
    assert found["losses"][0] > found["losses"][1] > found["losses"][2]
    assert found["lacking"] == 0
    # Experts kept from the forward pass for the backward pass would not fit: each of six passes reads more than four
    # times the limit. In the files they are bfloat16, half as large as computed with.
    assert 2 * found["read"] > 6 * 4 * TRAINING_LIMIT_BYTES
