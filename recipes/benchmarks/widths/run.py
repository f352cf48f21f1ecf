"""One sequence, one token at a time, through servers that keep their weights in several widths."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor
from transformers import PreTrainedModel

from recipes.benchmarks.arms import local_model, prompt_tokens
from recipes.benchmarks.llama.files import write_model
from recipes.benchmarks.llama.process import LlamaCpp, check_llama_cpp, has_llama_cpp
from recipes.benchmarks.measure import Arm, take_turns
from recipes.benchmarks.swarm import served_model, serving
from recipes.benchmarks.train import batch_of_texts, prompt_gradient, timed_run
from recipes.benchmarks.widths.report import PAIRS, WidthsReport
from recipes.benchmarks.widths.sides import LlamaCppSide, ModelSide
from swarm_plugins.errors import ConfigError, SwarmError

_BATCH = 8
"""Rows of a training step."""
_STEPS = 32
"""Tokens whose logits are compared."""


def bench_widths(
    directory: Path,
    *,
    widths: Sequence[str],
    gguf: Sequence[Path],
    is_alone: bool,
    prefix_tokens: int,
    new_tokens: int,
    rounds: int,
    progress: Progress,
) -> WidthsReport:
    """Compares decoding, prompts and training steps through one server for each width, in turns.

    Args:
        directory: The model.
        widths: Of the servers' weights.
        gguf: Files of the same model for llama.cpp. Empty: one is made for each width that has a type of its size.
        is_alone: Whether llama.cpp is left out.
        prefix_tokens: Tokens of the prompt.
        new_tokens: Tokens decoded in a round.
        rounds: Rounds after one to warm up.
        progress: Shows how far it is.

    Raises:
        ConfigError: If a width is unknown, or a file does not exist.
        MissingExtraError: If a file is given and llama.cpp is not installed.
        SwarmError: If a float32 server's tokens differ from the local model's.
    """
    if is_alone and gguf:
        raise ConfigError("--alone leaves llama.cpp out: give no --gguf with it")
    check_llama_cpp(gguf)
    options = {width: serving(width) for width in widths}
    local = local_model(directory)
    prompts = [
        prompt_tokens(directory, length=prefix_tokens, vocab_size=local.config.vocab_size, shift=index)
        for index in range(rounds + 1)
    ]
    here = ModelSide("transformers, float32", (os.getpid(),), local, prompts, new_tokens)
    with ExitStack() as stack:
        ours = [_served(stack, directory, *one, prompts, new_tokens) for one in options.items()]
        files = {file.stem: file for file in gguf}
        if not gguf and not is_alone and has_llama_cpp():
            files = _made(directory, Path(stack.enter_context(tempfile.TemporaryDirectory())), widths)
        others = {name: _other(stack, name, file, prompts, new_tokens) for name, file in files.items()}
        arms = [side.arm for side in (here, *ours, *others.values())]
        take_turns("widths", arms, rounds=rounds, progress=progress)
        tokens = batch_of_texts(directory, _BATCH, local.config.vocab_size)
        steps = [Arm(timed_run(prompt_gradient(side.model, tokens)), side.arm.pids) for side in (here, *ours)]
        take_turns("training", steps, rounds=rounds, progress=progress)
        report = WidthsReport(
            command="benchmark widths", model=directory.resolve().name, local=here.measured(here, steps[0])
        )
        text = torch.cat([prompts[-1], torch.tensor([here.tokens])], dim=1)
        expected = _log_probabilities(local, text)
        for side, step in zip(ours, steps[1:], strict=True):
            if side.name == "float32" and side.tokens != here.tokens:
                raise SwarmError(f"decoded {side.tokens}, expected the local model's {here.tokens}")
            found = _log_probabilities(side.model, text)
            divergence = float((expected.exp() * (expected - found)).sum(-1).mean())
            is_equal = side.tokens == here.tokens
            report.figures.append(side.measured(here, step, divergence=divergence, is_equal=is_equal))
        report.others.update({name: side.measured(here) for name, side in others.items()})
    report.notes.append(f"prefix {prefix_tokens} tokens, {new_tokens} new ones; one thread a side")
    if not others and not is_alone:
        report.notes.append("llama.cpp is left out: the package xllamacpp is not installed, or no width has its like")
    return report


def _served(
    stack: ExitStack, directory: Path, width: str, chosen: dict[str, Any], prompts: Sequence[Tensor], new_tokens: int
) -> ModelSide:
    model, pids = served_model(stack, directory, **chosen)
    return ModelSide(width, pids, model, prompts, new_tokens)


def _made(directory: Path, folder: Path, widths: Sequence[str]) -> dict[str, Path]:
    """Writes the model in llama.cpp's types of the same sizes; returns the files by type."""
    kinds = dict.fromkeys(PAIRS[width] for width in widths if width in PAIRS)
    return {kind: write_model(directory, folder / f"{kind}.gguf", kind) for kind in kinds}


def _other(stack: ExitStack, name: str, file: Path, prompts: Sequence[Tensor], new_tokens: int) -> LlamaCppSide:
    llama = stack.enter_context(LlamaCpp(file))
    llama.open(prompts[0].shape[1] + new_tokens)
    return LlamaCppSide(name, llama, prompts, new_tokens)


@torch.no_grad()
def _log_probabilities(model: PreTrainedModel, text: Tensor) -> Tensor:
    """Returns the log-probabilities of the tokens that follow the last ones of a text, ``[tokens, vocabulary]``."""
    logits: Tensor = model(text, use_cache=False).logits[0, -_STEPS:]
    return logits.float().log_softmax(-1)
