"""Which experts a model's tokens take, and which ones its routers would have named early, piece by piece of a text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from recipes.study.corpus import Corpus, bpe_file, load_corpus
from recipes.study.settings import Run, Shape, Training
from recipes.study.training import Place, train
from swarm_plugins.errors import UnsupportedError
from swarm_plugins.offload.ahead.prefetch import find_routers

_WIDTH, _VOCAB = 96, 1024
_CORPUS = "corpus"
_PRMOE = Shape(
    width=_WIDTH,
    neurons=2 * _WIDTH,
    heads=4,
    experts=(0, 4, 0, 4, 0, 4, 0, 8, 0, 8, 0, 8),
    residual="sum",
)
"""A PR-MoE with six layers of experts: the study's have two, and nothing can be guessed far ahead in these."""
_TRAINING = Training(steps=400, rows=8, length=128, learning_rate=4e-3, warmup_steps=20)


@dataclass
class Trace:
    """One piece of text, by layer with experts from the first to the last."""

    inputs: list[Tensor] = field(default_factory=list)
    """What the routers got, ``[T, D]``."""
    picks: list[Tensor] = field(default_factory=list)
    """Experts that the tokens took, ``[T, k]``."""


def traces(model: nn.Module, pieces: Tensor, on_piece: Callable[[], None]) -> list[Trace]:
    """Reads pieces ``[pieces, T]``, all tokens at once, which routes them as decoding token by token does.

    Raises:
        UnsupportedError: If the model's routers are not found.
    """
    routers = find_routers(model)
    if not routers:
        raise UnsupportedError(f"{type(model).__name__} has no routers next to experts: give a mixture of experts")
    found = []
    for piece in pieces:
        with torch.no_grad(), _recorded(routers) as trace:
            model(input_ids=piece[None], use_cache=False)
        found.append(trace)
        on_piece()
    return found


def ranking(router: nn.Module, hidden: Tensor) -> Tensor:
    """Returns the experts of a layer, the likeliest first, ``[T, E]``, for inputs ``[T, D]``."""
    with torch.no_grad():
        logits: Tensor = router.forward(hidden)[0]
    return logits.argsort(dim=-1, descending=True, stable=True)


def trained_prmoe(folder: Path) -> tuple[nn.Module, Corpus]:
    """Returns a small PR-MoE and its text; trains it there for some minutes unless the folder has it already.

    Raises:
        MissingExtraError: If the text is not installed.
    """
    place, run, corpus = _trained(folder)
    return place.model(run), corpus


def prmoe_checkpoint(folder: Path) -> Path:
    """Returns the checkpoint of `trained_prmoe`, with its tokenizer."""
    place, run, _ = _trained(folder)
    model = place.model_folder(run)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(bpe_file(folder / _CORPUS, _VOCAB)))
    tokenizer.save_pretrained(model)
    return model


def _trained(folder: Path) -> tuple[Place, Run, Corpus]:
    corpus = load_corpus(folder / _CORPUS, _VOCAB)
    run = Run(shape=_PRMOE, training=_TRAINING, seed=0, corpus=corpus.facts.digest, vocab_size=corpus.vocab_size)
    place = Place(folder)
    train(run, corpus, place)
    return place, run, corpus


def held_out_pieces(corpus: Corpus, count: int, length: int) -> Tensor:
    """Returns ``[count, length]`` tokens, evenly spread over the held-out files."""
    step = (len(corpus.held_out) - length) // max(1, count - 1)
    return torch.stack([corpus.held_out[step * index : step * index + length] for index in range(count)]).long()


@contextmanager
def _recorded(routers: Sequence[nn.Module]) -> Iterator[Trace]:
    trace = Trace()

    def record(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        trace.inputs.append(inputs[0].detach().reshape(-1, inputs[0].shape[-1]))
        trace.picks.append(output[2].detach().reshape(trace.inputs[-1].shape[0], -1))

    handles = [router.register_forward_hook(record) for router in routers]
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()
