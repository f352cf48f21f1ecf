"""Plots which experts a text's tokens use, layer by layer, as in Figure 1 of Eliseev and Mazur (2023)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from swarm_plugins.errors import ConfigError
from swarm_plugins.offload.model.outline import experts_modules
from recipes.study.drawing import new_figure

ExpertUse = Mapping[int, Sequence[Tensor]]
"""``[T, experts_per_token]`` for each pass, by layer; tokens in order."""

# More would not be readable on a page.
_MOST_LAYERS = 6


@contextmanager
def recorded_use(model: PreTrainedModel) -> Iterator[ExpertUse]:
    """Records the experts used inside the block, one sequence at a time."""
    use: dict[int, list[Tensor]] = {}
    handles = []

    def recorder(layer: int) -> Any:
        def record(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            use.setdefault(layer, []).append(inputs[1].cpu())

        return record

    for layer, module in experts_modules(model).items():
        handles.append(module.register_forward_pre_hook(recorder(layer)))
    try:
        yield use
    finally:
        for handle in handles:
            handle.remove()


def draw_expert_use(use: ExpertUse, num_experts: int, file: Path) -> None:
    """Draws one strip for each of a few layers: tokens from left to right, experts from bottom to top.

    Raises:
        MissingExtraError: If matplotlib is not installed.
        ConfigError: If nothing was recorded, or the file cannot be written.
    """
    layers = shown_layers(sorted(use))
    if not layers:
        raise ConfigError("no expert was used: there is nothing to draw")
    figure = new_figure((10, 1.2 + 0.9 * len(layers)))
    strips: Any = figure.subplots(len(layers), 1, sharex=True, squeeze=False)
    for strip, layer in zip(strips[:, 0], layers, strict=True):
        strip.imshow(_strip(use[layer], num_experts), aspect="auto", origin="lower", cmap="Blues", vmin=0, vmax=1)
        strip.set_ylabel(f"layer {layer}", rotation=0, ha="right", va="center")
        strip.set_yticks([])
    strips[-1, 0].set_xlabel("token")
    try:
        figure.savefig(file)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"cannot draw to {file} ({exc}); name a file that ends in .svg, .png or .pdf") from exc


def shown_layers(layers: Sequence[int]) -> Sequence[int]:
    """Returns a few layers, evenly from the first to the last."""
    if len(layers) <= _MOST_LAYERS:
        return layers
    return [layers[round(index * (len(layers) - 1) / (_MOST_LAYERS - 1))] for index in range(_MOST_LAYERS)]


def _strip(passes: Sequence[Tensor], num_experts: int) -> Any:
    picked = torch.cat(list(passes))  # [T, experts_per_token]
    used = torch.zeros(len(picked), num_experts)  # [T, E]
    return used.scatter_(1, picked, 1.0).T.numpy()
