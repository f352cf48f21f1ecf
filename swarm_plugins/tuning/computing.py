"""Losses and gradients of texts in padded batches; several models' texts can be in one, each by its own adapter."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from swarm_plugins.errors import NumericError
from swarm_plugins.tuning.batches import batches_of
from swarm_plugins.tuning.datums import Datum, LossCall
from swarm_plugins.tuning.losses import LOSSES, TARGETS, Scores

_MAX_LOGITS = 1 << 25
"""Of a batch: 128 MiB in float32, and twice as much for their softmax and their gradient."""
_MAX_BATCH_TOKENS = 2048
_NOT_FINITE = "the loss is NaN or infinite: lower the learning rate, or look at advantages and logprobs"


@dataclass(frozen=True)
class Computed:
    """What a call has computed for one text."""

    logprobs: Tensor
    """Of its targets, in their shape, float32."""
    losses: Tensor
    """At each position, of the same shape, or ``[N]`` for a loss of all tokens; their sum is the text's loss."""


@dataclass(frozen=True)
class Part:
    """The texts of one call in a pass."""

    datums: Sequence[Datum]
    call: LossCall
    adapter: str = ""
    """Which adapter of the model its rows take; empty: the one that is active."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all its texts."""
        return sum(len(one.tokens) for one in self.datums)


def run_pass(
    model: Any, parts: Sequence[Part], *, backward: bool, stop: threading.Event | None = None
) -> list[list[Computed] | NumericError]:
    """Computes the losses of several calls, their texts of like lengths in one batch.

    Args:
        model: In eval mode.
        parts: The calls; all of them name an adapter, or there is one.
        backward: Whether gradients are added to the adapters' tensors.
        stop: Ends the pass before its next batch once it is set.

    Returns:
        For each call what was computed for each text; an error if its loss is NaN or infinite. Then it has added
        no gradients of the batches where it is, and the others have theirs.

    Raises:
        CancelledError: If it was stopped; gradients of the batches before are there.
    """
    texts = [(number, datum) for number, part in enumerate(parts) for datum in part.datums]
    found: dict[int, Computed] = {}
    failed: set[int] = set()
    for batch in batches_of([len(datum.tokens) for _, datum in texts], most_tokens(model)):
        if stop is not None and stop.is_set():
            raise CancelledError("stopped: its client has left")
        rows = [(parts[texts[index][0]], texts[index][1]) for index in batch]
        with torch.set_grad_enabled(backward):
            computed = _computed(model, rows)
            totals = _totals(zip([texts[index][0] for index in batch], computed, strict=True))
        failed |= {number for number, total in totals.items() if not bool(total.isfinite())}
        sound = [total for number, total in totals.items() if number not in failed]
        if backward and sound:
            torch.stack(sound).sum().backward()
        for index, one in zip(batch, computed, strict=True):
            found[index] = Computed(one.logprobs.detach(), one.losses.detach())
    results: list[list[Computed] | NumericError] = []
    for number in range(len(parts)):
        own = [found[index] for index, (owner, _) in enumerate(texts) if owner == number]
        results.append(NumericError(_NOT_FINITE) if number in failed else own)
    return results


@torch.no_grad()
def next_logits(model: Any, texts: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Yields which text it is, and its logits ``[N, V]`` in float32: of each position's next token.

    Args:
        model: In eval mode.
        texts: Token ids ``[N]`` each.
    """
    for batch in batches_of([len(text) for text in texts], most_tokens(model)):
        logits = _logits(model, [texts[index] for index in batch])
        for index, row in zip(batch, logits, strict=True):
            yield index, row[: len(texts[index])].float().cpu()


def most_tokens(model: Any) -> int:
    """Returns the most tokens of a batch, by what their logits take; a longer text is computed by itself."""
    vocabulary: int = model.config.get_text_config(decoder=True).vocab_size
    return max(1, min(_MAX_BATCH_TOKENS, _MAX_LOGITS // vocabulary))


def _totals(computed: Iterable[tuple[int, Computed]]) -> dict[int, Tensor]:
    """Returns the sum of the losses of each call."""
    of_call: dict[int, list[Tensor]] = {}
    for number, one in computed:
        of_call.setdefault(number, []).append(one.losses.sum())
    return {number: torch.stack(losses).sum() for number, losses in of_call.items()}


def _computed(model: Any, rows: Sequence[tuple[Part, Datum]]) -> list[Computed]:
    names = [part.adapter for part, _ in rows]
    by_row = {"adapter_names": names} if any(names) else {}
    logits = _logits(model, [datum.tokens for _, datum in rows], **by_row)
    # The function that samples are scored by: its rounding over a large vocabulary has a bias of its own.
    everything = logits.float().cpu().log_softmax(dim=2)
    # Targets of all rows at once: by row, each gradient would be a tensor as large as the row's logits.
    named = [datum.inputs[TARGETS].view(len(datum.tokens), -1) for _, datum in rows]  # [N, K]
    index = torch.zeros(*everything.shape[:2], max(one.shape[1] for one in named), dtype=torch.int64)
    for row, one in zip(index, named, strict=True):
        row[: one.shape[0], : one.shape[1]] = one
    chosen = everything.gather(2, index)
    found = []
    for one, row, own, (part, datum) in zip(named, everything.unbind(), chosen.unbind(), rows, strict=True):
        length, count = one.shape
        logprobs = own[:length, :count].reshape(datum.inputs[TARGETS].shape)
        scores = Scores(logprobs, row[:length])
        losses = LOSSES[part.call.name].compute(scores, datum.inputs, part.call.settings)
        found.append(Computed(logprobs, losses))
    return found


def _logits(model: Any, texts: Sequence[Tensor], **by_row: Any) -> Tensor:
    """Returns the logits ``[B, T, V]`` of texts as the rows of a padded batch."""
    ids = pad_sequence(list(texts), batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor([len(text) for text in texts])[:, None]
    output = model(
        input_ids=ids.to(model.device), attention_mask=mask.long().to(model.device), use_cache=False, **by_row
    )
    logits: Tensor = output.logits[:, -ids.shape[1] :]  # virtual tokens of soft prompts come first
    return logits
