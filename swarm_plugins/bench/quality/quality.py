"""What fewer bits cost: perplexity and size for each pair of widths, as Table 1 of Eliseev and Mazur 2023."""

from __future__ import annotations

import gc
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from swarm_plugins.bench.quality.table import QualityReport, Row
from swarm_plugins.demo.evaluation import Figure, change, losses_of
from swarm_plugins.demo.text import demo_pieces
from swarm_plugins.errors import ConfigError
from swarm_plugins.noise import quiet_loading
from swarm_plugins.offload import OffloadConfig, load_offloaded
from swarm_plugins.offload.formats.linears import quantize_linears
from swarm_plugins.offload.quantizing import other_tensors, quantize_checkpoint
from swarm_plugins.offload.widths import Width, sort_key
from swarm_plugins.talk.tokenizer import load_tokenizer

__all__ = ["bench_quality", "text_pieces"]


def bench_quality(
    report: QualityReport,
    model: str,
    pieces: Tensor,
    work: Path,
    *,
    experts: Sequence[Width],
    attention: Sequence[Width],
    revision: str | None = None,
) -> None:
    """Measures each pair of widths, the widest first: what the others are compared with.

    Args:
        report: Takes the rows.
        model: A directory, or an id on the Hub.
        pieces: Tokens to predict, ``[pieces, length]``.
        work: Directory for quantized stores, one at a time.
        experts: Widths of experts.
        attention: Widths of all other linear layers.
        revision: Branch, tag or commit on the Hub.
    """
    baseline: Tensor | None = None
    other_bytes: dict[Width, int] = {}
    for expert_bits in sorted(experts, key=sort_key, reverse=True):
        store = work / f"experts-{expert_bits}"
        size = quantize_checkpoint(model, store, expert_bits=expert_bits, revision=revision)
        for other_bits in sorted(attention, key=sort_key, reverse=True):
            loaded = _load(store)
            if other_bits not in other_bytes:
                other_bytes[other_bits] = _num_bytes(loaded, other_bits)
            if other_bits != 16:
                quantize_linears(loaded, other_bits, is_fitted=True)
            losses = losses_of(loaded, pieces, f"experts {expert_bits}, attention {other_bits}")
            baseline = losses if baseline is None else baseline
            report.rows.append(
                Row(
                    attention_bits=other_bits,
                    expert_bits=expert_bits,
                    num_bytes=size.expert_bytes + other_bytes[other_bits],
                    perplexity=math.exp(Figure.of(losses).mean),
                    loss_change=change(baseline, losses),
                )
            )
            # A model has cycles: only this closes its files and frees its memory.
            del loaded
            gc.collect()
        shutil.rmtree(store)


def text_pieces(model: str, text: Path | None, num_pieces: int, length: int, revision: str | None) -> Tensor:
    """Returns tokens of a text file, or of presidential addresses that `swarm demo` does not learn from.

    Raises:
        ConfigError: If the file is too short or cannot be read, or the model has no tokenizer.
        MissingExtraError: If the addresses are not installed.
    """
    tokenizer = load_tokenizer(model, revision)
    if text is None:
        return demo_pieces(tokenizer, length).held_out[:num_pieces]
    return _pieces_of_file(tokenizer, text, num_pieces, length)


def _pieces_of_file(tokenizer: Any, text: Path, num_pieces: int, length: int) -> Tensor:
    """Returns the first pieces of a text file, ``[pieces, length]``.

    Raises:
        ConfigError: If it is too short or cannot be read.
    """
    try:
        # Far more characters than a token has.
        with text.open(encoding="utf-8") as file:
            content = file.read(num_pieces * length * 32)
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{text} cannot be read as text ({exc}): give a file in UTF-8") from exc
    tokens = torch.tensor(tokenizer(content)["input_ids"][: num_pieces * length], dtype=torch.long)
    if len(tokens) < 2 * length:
        raise ConfigError(f"{text} has {len(tokens)} tokens, at least {2 * length} are needed: give a longer one")
    return tokens[: len(tokens) // length * length].reshape(-1, length)


def _load(store: Path) -> PreTrainedModel:
    with quiet_loading():
        return load_offloaded(store, OffloadConfig(prefetch=False), device="cpu")


def _num_bytes(model: PreTrainedModel, bits: Width) -> int:
    tensors, _ = other_tensors(model, bits)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
