"""What a curious first server reads: the share of input tokens it recovers from the hidden states it receives.

The attacker knows the model, and text of the same kind. Three attacks look at one position at a time:

- **embedding**: the nearest input embedding, by cosine, after subtracting the blocks' mean change.
- **reference**: the token of the nearest hidden state in a reference corpus at the same depth, by cosine after
  standardising each dimension.
- **probe**: a linear classifier trained on that corpus: linear discriminant analysis, class means with one covariance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoConfig, AutoModel, PreTrainedModel

from recipes.benchmarks.figures import Report, new_table
from swarm_plugins.demo.text import demo_documents, pieces_of
from swarm_plugins.errors import ConfigError
from swarm_plugins.talk.turns import load_tokenizer

_LENGTH = 128
_PIECES_PER_DOCUMENT = 4
_ROWS = 512
"""Hidden states compared at a time."""
_SHRINKAGE = 0.05
"""Weight of the mean variance in the covariance of the probe, which few tokens of a class estimate badly."""


@dataclass(frozen=True, kw_only=True)
class Depth:
    """Shares of held-out tokens recovered from the input of one block."""

    local_blocks: int
    """Blocks that run on the client, before the first server."""
    embedding: float
    reference: float
    probe: float


@dataclass(kw_only=True)
class PrivacyReport(Report):
    """Results for all depths."""

    num_reference: int
    """Tokens of the attacker's corpus."""
    num_tokens: int
    """Held-out tokens that are attacked."""
    seen: float
    """Share of held-out tokens that occur in the corpus at all: the bound of the last two attacks."""
    guess: float
    """Share recovered by always guessing the corpus's most frequent token."""
    depths: list[Depth] = field(default_factory=list)

    def tables(self) -> Iterator[Table]:
        """Yields one table with a row per depth."""
        headings = ("local blocks", "nearest embedding", "nearest of the corpus", "linear probe")
        table = new_table(f"{self.command}: {self.model}", headings)
        for one in self.depths:
            shares = (one.embedding, one.reference, one.probe)
            table.add_row(str(one.local_blocks), *(f"{share:.1%}" for share in shares))
        yield table


def bench_privacy(model: Path, *, depths: Sequence[int], documents: int, progress: Progress) -> PrivacyReport:
    """Attacks the input of block ``k`` for each of ``depths``, on presidential addresses.

    Raises:
        ConfigError: If the model has no such block or no tokenizer.
        MissingExtraError: If the addresses are not installed.
    """
    tokenizer = load_tokenizer(str(model), None)
    train, held_out = demo_documents(documents)
    corpus = pieces_of(tokenizer, train, _LENGTH, per_document=_PIECES_PER_DOCUMENT)
    secret = pieces_of(tokenizer, held_out, _LENGTH, per_document=_PIECES_PER_DOCUMENT)
    known, tokens = corpus.flatten(), secret.flatten()
    attacked = _load(model, depths)
    embeddings: Tensor = attacked.get_input_embeddings().get_parameter("weight").detach()  # [V, D]
    report = PrivacyReport(
        command="benchmark privacy",
        model=model.name,
        num_reference=known.numel(),
        num_tokens=tokens.numel(),
        seen=_share(torch.isin(tokens, known)),
        guess=_share(tokens == known.mode().values),
    )
    task = progress.add_task("running the first blocks", total=len(corpus) + len(secret) + len(depths))
    reference = _hidden_states(attacked, corpus, depths, lambda: progress.advance(task))
    hidden = _hidden_states(attacked, secret, depths, lambda: progress.advance(task))
    for depth in depths:
        progress.update(task, description=f"attacking the input of block {depth}")
        known_states, states = reference.pop(depth), hidden.pop(depth)  # [N, D], [T, D]
        report.depths.append(attack(depth, states, tokens, known_states, known, embeddings))
        progress.advance(task)
    report.notes.append(
        f"{report.num_tokens} held-out tokens; the attacker's corpus has {report.num_reference} tokens and "
        f"{report.seen:.1%} of the held-out ones; guessing the most frequent token recovers {report.guess:.1%}"
    )
    return report


def attack(
    depth: int, states: Tensor, tokens: Tensor, known_states: Tensor, known: Tensor, embeddings: Tensor
) -> Depth:
    """Returns the shares of ``tokens`` ``[T]`` that each attack recovers from their ``states`` ``[T, D]``.

    Args:
        depth: Local blocks before the first server.
        states: Hidden states under attack.
        tokens: The tokens behind them.
        known_states: Hidden states of the corpus at the same depth, ``[N, D]``.
        known: Tokens of the corpus, ``[N]``.
        embeddings: The model's input embeddings, ``[V, D]``.
    """
    change = (known_states - embeddings[known]).mean(0)
    mean, deviation = known_states.mean(0), known_states.std(0).clamp_min(1e-6)
    z_known, z = (known_states - mean) / deviation, (states - mean) / deviation
    return Depth(
        local_blocks=depth,
        embedding=_share(_nearest(states - change, embeddings) == tokens),
        reference=_share(known[_nearest(z, z_known)] == tokens),
        probe=_share(_probed(z, z_known, known) == tokens),
    )


def _load(model: Path, depths: Sequence[int]) -> PreTrainedModel:
    """Loads the first blocks, one more than is looked at: the last output is normalised."""
    deepest = max(depths)
    num_blocks = int(AutoConfig.from_pretrained(model).num_hidden_layers)
    if min(depths) < 0 or deepest >= num_blocks:
        raise ConfigError(f"invalid --depth {deepest}: {model} has blocks 0 to {num_blocks - 1}")
    loaded: PreTrainedModel = AutoModel.from_pretrained(model, num_hidden_layers=deepest + 1, dtype=torch.float32)
    return loaded


@torch.no_grad()
def _hidden_states(
    model: PreTrainedModel, pieces: Tensor, depths: Sequence[int], step: Callable[[], None]
) -> dict[int, Tensor]:
    """Returns the inputs of some blocks, each ``[tokens, D]``."""
    found: dict[int, list[Tensor]] = {depth: [] for depth in depths}
    for piece in pieces:
        states = model(piece[None], output_hidden_states=True, use_cache=False).hidden_states
        for depth in depths:
            found[depth].append(states[depth][0].clone())
        step()
    return {depth: torch.cat(states) for depth, states in found.items()}


def _nearest(states: Tensor, candidates: Tensor) -> Tensor:
    """Returns the index of the candidate with the largest cosine, ``[T]``."""
    candidates = normalize(candidates, dim=-1)
    return torch.cat([(part @ candidates.T).argmax(-1) for part in states.split(_ROWS)])


def _probed(states: Tensor, reference: Tensor, tokens: Tensor) -> Tensor:
    """Returns the tokens that linear discriminant analysis of ``reference`` finds for ``states``."""
    classes: Tensor
    classes, index, counts = tokens.unique(return_inverse=True, return_counts=True)
    means = torch.zeros(len(classes), reference.shape[1]).index_add_(0, index, reference) / counts[:, None]  # [C, D]
    centred = reference - means[index]
    covariance = centred.T @ centred / len(reference)
    width = covariance.shape[0]
    spread = covariance.diagonal().mean()
    covariance = (1 - _SHRINKAGE) * covariance + _SHRINKAGE * spread * torch.eye(width)
    weights = torch.linalg.solve(covariance, means.T)  # [D, C]
    bias = (counts / len(tokens)).log() - 0.5 * (means.T * weights).sum(0)
    found = torch.cat([(part @ weights + bias).argmax(-1) for part in states.split(_ROWS)])
    return classes.index_select(0, found)


def _share(hits: Tensor) -> float:
    return float(hits.float().mean())
