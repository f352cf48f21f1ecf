"""The benchmark of formats, on a toy: conversions round each weight once, and the table compares with float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.progress import Progress
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from recipes.benchmarks.formats import run
from recipes.benchmarks.formats.converting import WRITERS
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.checkpoint.outline import meta_model
from swarm_plugins.errors import ConfigError
from swarm_plugins.merging.base import PlainBase
from swarm_plugins.testing.models import tiny_tokenizer

pytest.importorskip("gguf")
# Half a step of e4m3 is a sixteenth of a number; of Q8_0 and Q4_0, about that part of a group's largest number.
STEPS = {"fp8": 2.0**-4, "pack-quantized": 1 / 13, "Q8_0": 1 / 200, "Q4_0": 1 / 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose rows are whole blocks of 32."""
    directory = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


@pytest.mark.parametrize("name", STEPS)
def test_a_checkpoint_has_the_weights_rounded_once(model: Path, tmp_path: Path, name: str) -> None:
    if name == "pack-quantized":
        pytest.importorskip("compressed_tensors", exc_type=ImportError)
    checkpoint = Checkpoint.open(WRITERS[name](model, tmp_path / "toy.gguf"))
    base = PlainBase(checkpoint, meta_model(checkpoint.config, torch.float32), torch.float32)
    wanted = load_file(model / "model.safetensors")
    assert base.tensors.keys() == wanted.keys()
    for key, found in base.read(list(base.tensors)).items():
        largest = wanted[key].abs().max()
        torch.testing.assert_close(found, wanted[key], rtol=0, atol=float(largest * STEPS[name]))
        is_packed = ".layers." in key and found.ndim == 2
        assert torch.equal(found, wanted[key]) != is_packed, key


def test_a_table_has_a_row_for_each_format(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = torch.randint(3, 100, (3, 32), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(run, "text_pieces", lambda *_: (pieces, "one"))
    monkeypatch.setattr(run, "library_pieces", lambda *_: (pieces.flip(1), "two"))
    with Progress(disable=True) as progress:
        report = run.bench_formats(model, formats=["Q8_0", "int8"], num_pieces=3, length=32, progress=progress)
        with pytest.raises(ConfigError, match="unknown format 'Q9'; known: fp8, pack-quantized, Q8_0"):
            run.bench_formats(model, formats=["Q9"], num_pieces=3, length=32, progress=progress)
    wide, *packed = report.rows
    assert [row.format for row in packed] == ["Q8_0", "int8"]
    # Two blocks: queries and output, keys and values, three of 64 x 160; and two norms.
    weights = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 160)
    norms = 2 * 2 * 64 * 4
    assert wide.block_bytes == 4 * weights + norms
    assert packed[0].block_bytes == weights * 34 // 32 + norms
    assert wide.block_bytes <= wide.held_bytes <= 1.1 * wide.block_bytes
    # Codes and scales apart, which are of float32 then.
    assert weights * 34 // 32 <= packed[0].held_bytes <= 1.1 * packed[0].block_bytes
    assert packed[1].held_bytes is None
    assert packed[1].block_bytes == weights + 4 * 2 * (2 * 64 + 2 * 32 + 2 * 160 + 64) + norms
    assert all(one.mean == 0 for one in wide.changes)
    assert all(0 < abs(one.mean) < 0.05 for row in packed for one in row.changes)
    assert next(report.tables()).row_count == 3
