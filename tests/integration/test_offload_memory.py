"""A model several times larger than the memory that it may take."""

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

from swarm_plugins.bench.offload.model import write_random_moe

MB = 10**6
LIMIT_BYTES = 130 * MB
"""Of private memory beside what Python, torch and transformers take themselves."""
TRAINING_LIMIT_BYTES = 200 * MB
"""Weights outside experts in float32, gradients and the backward pass's thread on top."""
FAST_BYTES = 40 * MB

# The limit is set when everything is imported. What cannot be allocated shows that it is really there.
LOAD = """
import json, resource, sys
import torch
from pathlib import Path
from peft import LoraConfig, get_peft_model
from swarm_plugins import OffloadConfig, load_offloaded

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))

directory, limit, fast = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
before = status("RssAnon")
top = status("VmData") + limit
resource.setrlimit(resource.RLIMIT_DATA, (top, top))
try:
    torch.empty(2 * limit, dtype=torch.uint8)
    refused = False
except RuntimeError:
    refused = True
"""

GENERATE = """
model = load_offloaded(directory, OffloadConfig(fast_bytes=fast), device="cpu")
ids = torch.arange(1, 25).reshape(1, -1)
out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, min_new_tokens=4, do_sample=False)
found = {"new": out.shape[1] - ids.shape[1]}
"""

# A LoRA on attention and on all experts. A hundred tokens go to most experts of a layer.
# In float32: for bfloat16, oneDNN compiles a kernel for each number of rows that an expert gets and keeps them all,
# hundreds of megabytes that are nobody's weights.
TRAIN = """
model = load_offloaded(directory, OffloadConfig(fast_bytes=fast), device="cpu", dtype=torch.float32)
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
found = {"losses": losses, "lacking": lacking, "trained": sum(parameter.nbytes for parameter in trained)}
"""

REPORT = """
stats = model.offload_stats()
found |= {"refused": refused, "grown": status("RssAnon") - before, "read": stats.bytes_read}
print(json.dumps(found))
"""


@pytest.fixture
def large() -> Iterator[Path]:
    """805 MB of experts in bfloat16; not in pytest's own folders, which are kept for three runs."""
    config = AutoConfig.for_model(
        "olmoe",
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        num_experts=32,
        num_experts_per_tok=2,
    )
    with tempfile.TemporaryDirectory() as folder:
        yield write_random_moe(config, Path(folder) / "model")


def run_under_limit(directory: Path, program: str, limit: int) -> dict[str, Any]:
    arguments = [sys.executable, "-c", LOAD + program + REPORT, str(directory), str(limit), str(FAST_BYTES)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["refused"]
    assert found["grown"] < limit
    return found


def test_a_model_six_times_the_memory_limit_generates(large: Path) -> None:
    size = sum(file.stat().st_size for file in large.glob("*.safetensors"))
    assert size > 6 * LIMIT_BYTES
    found = run_under_limit(large, GENERATE, LIMIT_BYTES)
    assert found["new"] == 4
    # Far more than fits went through the memory.
    assert found["read"] > 5 * FAST_BYTES


def test_an_adapter_on_experts_eight_times_the_memory_limit_is_trained(large: Path) -> None:
    found = run_under_limit(large, TRAIN, TRAINING_LIMIT_BYTES)
    assert found["losses"][0] > found["losses"][1] > found["losses"][2]
    assert found["lacking"] == 0
    # Experts kept from the forward pass for the backward pass would not fit: each of six passes reads more than four
    # times the limit. In the files they are bfloat16, half as large as computed with.
    assert 2 * found["read"] > 6 * 4 * TRAINING_LIMIT_BYTES
