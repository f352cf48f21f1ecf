"""What codecs cost: loss and greedy tokens of a text, training, bytes and processor time, against no packing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from recipes.benchmarks.arms import check_directory
from recipes.benchmarks.figures import Report, goal_cells, new_table
from recipes.benchmarks.swarm import swarm_model
from recipes.benchmarks.texts import text_pieces
from swarm_plugins.client import SwarmConfig
from swarm_plugins.demo.evaluation import Figure, change, losses_of
from swarm_plugins.demo.text import Pieces, demo_pieces
from swarm_plugins.local_swarm import LocalSwarm
from swarm_plugins.recipes.adapter import adapter_config, put_on
from swarm_plugins.talk.turns import load_tokenizer
from swarm_plugins.transport.codec import pack, packed_bytes, unpack
from swarm_plugins.transport.messages import CODECS, Codec

GOALS = {"rotated8": (1.04, 0.985)}
"""Most bytes of a number, and least share of tokens that stay the same."""
_ROUNDS = 9
_TRAINED: tuple[Codec, ...] = ("none", "rotated8")
_BATCH, _TRAINED_TOKENS = 2, 64
_LORA = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
_LEARNING_RATE = 2e-3


@dataclass(frozen=True, kw_only=True)
class Row:
    """One codec."""

    codec: Codec
    bytes_per_number: float
    loss: float
    loss_change: Figure
    """Relative to ``none``, with its standard error over pieces."""
    same_tokens: float
    """Share of positions whose most likely next token is that of ``none``."""
    pack_ms: float
    """Processor time of packing 1 MiB of float32."""
    unpack_ms: float

    @property
    def reached(self) -> bool | None:
        """Whether the goals of this codec are reached; None without any."""
        if self.codec not in GOALS:
            return None
        most_bytes, least_same = GOALS[self.codec]
        return self.bytes_per_number <= most_bytes and self.same_tokens >= least_same


@dataclass(frozen=True, kw_only=True)
class Training:
    """Training of a LoRA adapter, whose hidden states and gradients travel by one codec."""

    codec: Codec
    before: float
    """Held-out loss."""
    after: Figure
    """Its mean over seeds, with the standard error."""
    change: Figure
    """Of the loss afterwards, relative to ``none`` with the same seed."""


@dataclass(kw_only=True)
class CodecReport(Report):
    """Results for all codecs."""

    rows: list[Row] = field(default_factory=list)
    training: list[Training] = field(default_factory=list)

    def tables(self) -> Iterator[Table]:
        """Yields one table with a row per codec, and one of trainings, if there were any."""
        headings = ("codec", "bytes a number", "loss", "change of loss", "same token", "goal", "", "pack", "unpack")
        table = new_table(f"{self.command}: {self.model}", headings, names=("codec", ""))
        for row in self.rows:
            goal = None if row.reached is None else "{1:.1%}, <= {0:.2f} B".format(*GOALS[row.codec])
            table.add_row(
                row.codec,
                f"{row.bytes_per_number:.3f}",
                f"{row.loss:.4f}",
                f"{row.loss_change.mean:+.4f} ± {row.loss_change.standard_error:.4f}",
                f"{row.same_tokens:.2%}",
                *goal_cells(goal, row.reached, is_upper_bound=False),
                f"{row.pack_ms:.2f} ms/MiB",
                f"{row.unpack_ms:.2f} ms/MiB",
            )
        yield table
        if self.training:
            yield _training_table(self.training)


def bench_codec(
    directory: Path,
    *,
    num_servers: int,
    text: Path | None,
    num_pieces: int,
    length: int,
    num_steps: int = 0,
    num_seeds: int = 3,
    progress: Progress,
) -> CodecReport:
    """Predicts a text through a chain of servers, once with each codec, and trains an adapter.

    Args:
        directory: The model.
        num_servers: Servers in the chain.
        text: File to predict. None: the held-out addresses of `swarm demo`.
        num_pieces: Pieces of the text.
        length: Tokens of a piece.
        num_steps: Steps of each training, on 2 x 64 tokens of the addresses; 0: none.
        num_seeds: Trainings with each codec.
        progress: Shows how far it is.

    Raises:
        ConfigError: If there is no model or tokenizer, or the text is too short or cannot be read.
        MissingExtraError: If the addresses are not installed.
        SwarmError: If the swarm does not start or does not answer.
    """
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(str(check_directory(directory)), None)
    pieces, name = text_pieces(tokenizer, text, num_pieces, length)
    report = CodecReport(command="benchmark codec", model=directory.resolve().name)
    with LocalSwarm(directory, num_servers=num_servers, dtype="float32", threads=1) as swarm:
        exact: tuple[Tensor, Tensor] | None = None
        for codec in CODECS:
            model = swarm_model(directory, swarm.initial_peers, SwarmConfig(codec=codec))
            bar = progress.add_task(codec, total=len(pieces))
            losses, tokens = _predicted(model, pieces, lambda bar=bar: progress.advance(bar))  # type: ignore[misc]
            exact = exact or (losses, tokens)
            hidden = model.get_input_embeddings()(pieces[0])[None].detach()  # [1, S, D]
            report.rows.append(_row(codec, losses, tokens, exact, hidden))
        if num_steps:
            report.training += _trainings(
                lambda codec: swarm_model(directory, swarm.initial_peers, SwarmConfig(codec=codec)),
                demo_pieces(tokenizer, _TRAINED_TOKENS),
                num_steps=num_steps,
                num_seeds=num_seeds,
                progress=progress,
            )
            report.notes.append(
                f"training: LoRA, {num_steps} steps of {_BATCH} x {_TRAINED_TOKENS} tokens, {num_seeds} seeds"
            )
    report.notes.append(f"{num_servers} server(s); {pieces.numel()} tokens of {name} in {len(pieces)} pieces")
    return report


def _predicted(model: PreTrainedModel, pieces: Sequence[Tensor] | Tensor, on_piece: Callable[[], None]) -> Any:
    """Returns the loss of each piece, ``[pieces]``, and the most likely next token everywhere, ``[pieces, S]``."""
    losses, tokens = [], []
    with torch.no_grad():
        for piece in pieces:
            logits = model(input_ids=piece[None], use_cache=False).logits[0].float()  # [S, V]
            losses.append(functional.cross_entropy(logits[:-1], piece[1:]))
            tokens.append(logits.argmax(dim=-1))
            on_piece()
    return torch.stack(losses), torch.stack(tokens)


def _row(codec: Codec, losses: Tensor, tokens: Tensor, exact: tuple[Tensor, Tensor], hidden: Tensor) -> Row:
    flat = hidden.reshape(-1).contiguous()
    packed = pack(flat, codec)
    if packed is None or codec == "none":
        pack_s = unpack_s = 0.0
    else:
        payload = packed.view(torch.uint8)
        pack_s = _cpu_s(lambda: pack(flat, codec))
        unpack_s = _cpu_s(lambda: unpack(payload, codec, flat.dtype, flat.numel()))
    ms_per_mib = 1e3 * (1 << 20) / flat.nbytes
    return Row(
        codec=codec,
        bytes_per_number=packed_bytes(codec, flat.dtype, flat.numel()) / flat.numel(),
        loss=float(losses.mean()),
        loss_change=change(exact[0], losses),
        same_tokens=float((tokens == exact[1]).float().mean()),
        pack_ms=pack_s * ms_per_mib,
        unpack_ms=unpack_s * ms_per_mib,
    )


def _cpu_s(work: Callable[[], object]) -> float:
    """Returns the processor seconds of this thread for some work: the median of some rounds, after one to warm up."""
    times = []
    for _ in range(_ROUNDS + 1):
        started = time.thread_time()
        work()
        times.append(time.thread_time() - started)
    return median(times[1:])


def _trainings(
    load: Callable[[Codec], PreTrainedModel], pieces: Pieces, *, num_steps: int, num_seeds: int, progress: Progress
) -> Iterator[Training]:
    exact: Tensor | None = None
    for codec in _TRAINED:
        before, after = [], []
        for seed in range(num_seeds):
            bar = progress.add_task(f"training, {codec}, seed {seed}", total=num_steps)
            losses = _trained(load(codec), pieces, seed, num_steps, lambda bar=bar: progress.advance(bar))  # type: ignore[misc]
            before.append(losses[0])
            after.append(losses[1])
        lost = torch.tensor(after)  # [seeds]
        exact = lost if exact is None else exact
        yield Training(codec=codec, before=before[0], after=Figure.of(lost), change=change(exact, lost))


def _trained(
    model: PreTrainedModel, pieces: Pieces, seed: int, num_steps: int, on_step: Callable[[], None]
) -> tuple[float, float]:
    """Trains a LoRA adapter; returns the held-out loss before and after."""
    torch.manual_seed(seed)
    tuned = put_on(model, adapter_config(_LORA, task_type="CAUSAL_LM"))
    parameters = [one for one in tuned.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=_LEARNING_RATE, weight_decay=0.0)
    order = torch.Generator().manual_seed(seed)
    before = float(losses_of(tuned, pieces.held_out, "held-out loss").mean())
    for _ in range(num_steps):
        rows = pieces.train[torch.randint(len(pieces.train), (_BATCH,), generator=order)]
        optimizer.zero_grad()
        tuned(input_ids=rows, labels=rows, use_cache=False).loss.backward()
        optimizer.step()
        on_step()
    return before, float(losses_of(tuned, pieces.held_out, "held-out loss").mean())


def _training_table(training: Sequence[Training]) -> Table:
    headings = ("codec", "before", "after", "change")
    table = new_table("held-out loss of a trained adapter", headings, names=("codec",))
    for one in training:
        after = f"{one.after.mean:.4f} ± {one.after.standard_error:.4f}"
        table.add_row(
            one.codec, f"{one.before:.4f}", after, f"{one.change.mean:+.4f} ± {one.change.standard_error:.4f}"
        )
    return table
