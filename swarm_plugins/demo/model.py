"""Makes, checks and caches the demonstration's model: a real mixture of experts from SmolLM2-135M-Instruct."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from swarm_plugins.checkpoint.range_cache import default_cache
from swarm_plugins.demo.dense_model import smollm2
from swarm_plugins.demo.text import demo_pieces
from swarm_plugins.demo.upcycling import Variant, calibrate, mixtral_config, write_weights
from swarm_plugins.demo.writing import make_once, new_folder
from swarm_plugins.errors import CheckpointError, ConfigError
from swarm_plugins.model_names import expanded
from swarm_plugins.noise import quiet_loading

VARIANTS = {one.name: one for one in (Variant(num_experts=4, neurons=1536), Variant(num_experts=8, neurons=1152))}
"""Variants by name: 4x1536 computes exactly the dense model's outputs; the experts of 8x1152 really differ."""
_ABOUT_FILE = "demo_model.json"
_FORMAT = 1
_CALIBRATION_PIECES = {4: 16, 8: 32}
"""Pieces of text by number of experts: routers alone need less text than fitted experts."""
_NEEDED_BYTES = 2_500_000_000
# Thirty layers with another order of additions; measured 5e-5, while a wrong expert changes logits by whole numbers.
_LOGIT_TOLERANCE = 2e-3


@dataclass(frozen=True, kw_only=True)
class BuiltModel:
    """A finished model, as recorded in its folder."""

    variant: str
    seed: int
    load_entropy: float
    """Evenness of the experts' use in the worst layer, 0 to 1."""
    logit_difference: float
    """Largest difference of a logit from the dense model's."""
    dense_loss: float
    """Loss of the dense model on a held-out piece."""
    loss: float
    """Loss of the mixture on the same piece."""


def find_variant(name: str) -> Variant:
    """Returns a variant by its name; raises ConfigError if it is unknown."""
    if name not in VARIANTS:
        raise ConfigError(f"unknown variant {name!r}; known: {', '.join(VARIANTS)}")
    return VARIANTS[name]


def default_folder(variant: Variant) -> Path:
    """Returns the model's folder in the cache."""
    return default_cache() / f"SmolLM2-MoE-{variant.name}"


def demo_model(variant: Variant, folder: Path, *, seed: int = 0, source: Path | None = None) -> BuiltModel:
    """Makes the model unless ``folder`` already holds it: an ordinary checkpoint in Mixtral's format, with tokenizer.

    ``seed`` is the routers'; ``source`` is the dense model's directory, by default SmolLM2-135M-Instruct.

    Raises:
        ConfigError: If the folder holds something else.
        CheckpointError: If the model cannot be written, or computes wrong outputs.
        MissingExtraError: If text or converter are not installed.
    """
    target = expanded(folder).absolute()

    def make() -> BuiltModel:
        with new_folder(target, needed_bytes=_NEEDED_BYTES, cure="choose another folder") as out:
            built = _build(variant, out, seed, source or smollm2())
            (out / _ABOUT_FILE).write_text(json.dumps({"format": _FORMAT, **asdict(built)}, indent=2))
        return built

    return make_once(target, lambda: _made_before(target, variant, seed), make)


def _made_before(target: Path, variant: Variant, seed: int) -> BuiltModel | None:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return None
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        about = json.loads((target / _ABOUT_FILE).read_text())
        if (about.pop("format"), about["variant"], about["seed"]) == (_FORMAT, variant.name, seed):
            return BuiltModel(**about)
    raise ConfigError(
        f"{target} exists and is not the model {variant.name} of seed {seed}: give another folder or remove it"
    )


def _build(variant: Variant, out: Path, seed: int, source: Path) -> BuiltModel:
    tokenizer = AutoTokenizer.from_pretrained(source)
    pieces = demo_pieces(tokenizer)
    dense = _load(source)
    step = max(1, len(pieces.train) // _CALIBRATION_PIECES.get(variant.num_experts, 64))
    seen = calibrate(dense, pieces.train[::step])
    mixtral_config(dense.config, variant).save_pretrained(out)  # type: ignore[arg-type]  # a Llama's, as made
    if dense.generation_config is not None:
        dense.generation_config.save_pretrained(out)
    tokenizer.save_pretrained(out)
    try:
        entropy = write_weights(dense, seen, variant, out, seed=seed)
    except SafetensorError as exc:
        raise CheckpointError(f"the weights could not be written to {out.parent.parent} ({exc})") from exc
    probe = pieces.held_out[:2]
    expected = _logits(dense, probe)
    is_exact = variant.neurons == dense.config.intermediate_size
    del dense
    logits = _logits(_load(out), probe)
    difference = float((logits - expected).abs().max())
    if not difference <= _LOGIT_TOLERANCE and is_exact:
        raise CheckpointError(
            f"logits of the mixture differ by {difference:.3g} from the dense model's, at most "
            f"{_LOGIT_TOLERANCE:g} is rounding; delete {source} so that it is made again, and try again"
        )
    return BuiltModel(
        variant=variant.name,
        seed=seed,
        load_entropy=entropy,
        logit_difference=difference,
        dense_loss=_loss(expected, probe),
        loss=_loss(logits, probe),
    )


def _load(folder: Path) -> PreTrainedModel:
    load: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_pretrained
    with quiet_loading():
        model = load(folder, dtype=torch.float32)
    model.eval()
    return model


def _logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


def _loss(logits: Tensor, tokens: Tensor) -> float:
    return float(functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))
