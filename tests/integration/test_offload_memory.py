"""A model several times larger than the memory that it may take."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoConfig

from swarm_plugins.cli._bench.offload_model import write_random_moe

MB = 10**6
LIMIT_BYTES = 130 * MB
"""Of private memory beside what Python, torch and transformers take themselves."""
FAST_BYTES = 40 * MB

# The limit is set when everything is imported. What cannot be allocated shows that it is really there.
PROGRAM = """
import json, resource, sys
import torch
from pathlib import Path
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
model = load_offloaded(directory, OffloadConfig(fast_bytes=fast), device="cpu")
ids = torch.arange(1, 25).reshape(1, -1)
out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, min_new_tokens=4, do_sample=False)
stats = model.offload_stats()
print(json.dumps({
    "refused": refused, "new": out.shape[1] - ids.shape[1], "grown": status("RssAnon") - before,
    "misses": stats.misses, "read": stats.bytes_read,
}))
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


def test_a_model_six_times_the_memory_limit_generates(large: Path) -> None:
    size = sum(file.stat().st_size for file in large.glob("*.safetensors"))
    assert size > 6 * LIMIT_BYTES
    arguments = [sys.executable, "-c", PROGRAM, str(large), str(LIMIT_BYTES), str(FAST_BYTES)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["refused"]
    assert found["new"] == 4
    assert found["grown"] < LIMIT_BYTES
    # Far more than fits went through the memory.
    assert found["read"] > 5 * FAST_BYTES
