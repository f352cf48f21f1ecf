"""Tiny random models that read images and text, with prompts that hold images: random pixels, no processor."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, Gemma3Processor, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from type_models import OVERRIDES, _merged, _shrunk

from swarm_plugins.checkpoint.tiny import randomize
from swarm_plugins.testing.models import tiny_tokenizer

_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_PLANES = {"rope_parameters": _ROPE}
_GRID = {"spatial_merge_size": 2, "temporal_patch_size": 2}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "aya_vision": {},
    "cohere2_vision": {},
    # More tokens an image than the window of sliding layers.
    "gemma3": {"mm_tokens_per_image": 16},
    "gemma4": {
        "text_config": {**OVERRIDES["gemma4"]["text_config"], "use_bidirectional_attention": "vision"},
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "position_embedding_size": 16,
        },
    },
    "gemma4_unified": {
        "text_config": {**OVERRIDES["gemma4_unified"]["text_config"], "use_bidirectional_attention": "vision"},
        "vision_config": {
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "mm_embed_dim": 32,
            "mm_posemb_size": 16,
            "output_proj_dims": 32,
        },
    },
    "glm4v": {"text_config": _PLANES},
    "got_ocr2": {},
    "internvl": {"vision_config": {"image_size": [32, 32], "patch_size": [8, 8]}},
    "lighton_ocr": {},
    "llama4": {"vision_config": {"intermediate_size": 128, "projector_input_dim": 32, "projector_output_dim": 32}},
    "llava": {},
    "mistral3": {},
    "ovis2": {},
    "paligemma": {"projection_dim": 32, "vision_config": {"projection_dim": 32}},
    "qwen2_5_vl": {
        "text_config": _PLANES,
        "vision_config": {**_GRID, "window_size": 16, "fullatt_block_indexes": [1, 3]},
    },
    "qwen2_vl": {"text_config": _PLANES, "vision_config": {"embed_dim": 32, "hidden_size": 32}},
    "qwen3_5": {"vision_config": _GRID},
    "qwen3_5_moe": {"vision_config": _GRID},
}
"""Types that are compared, with what images need of their configs."""


def save_image_type(model_type: str, directory: Path, **changes: Any) -> Path:
    """Saves a type's tiny model, float32, with the same weights each time; returns the directory."""
    config_class = CONFIG_MAPPING[model_type]
    settings = _merged(_shrunk(config_class), OVERRIDES.get(model_type, {}))
    config = config_class(**_merged(settings, {**SETTINGS[model_type], **changes}))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    randomize(model, torch.Generator().manual_seed(0))
    model.save_pretrained(directory)
    return directory


def save_with_processor(directory: Path) -> Path:
    """Saves a tiny Gemma 3 with a processor of pictures and text; returns the directory."""
    names = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    ends = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer().backend_tokenizer, extra_special_tokens=names, **ends
    )
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    settings = {f"{name}_index": index for name, index in ids.items()}
    save_image_type("gemma3", directory, **settings)
    pictures = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    Gemma3Processor(pictures, tokenizer, image_seq_length=16).save_pretrained(directory)
    return directory


def prompts(model: Any, *rows: str) -> dict[str, Tensor]:
    """Returns what a local model is called with for some rows, padded on the left.

    Args:
        model: The model.
        *rows: Of ``t``, some words, and ``i``, an image: ``tit`` has an image between words.
    """
    generator = torch.Generator().manual_seed(1)
    num_images = sum(row.count("i") for row in rows)
    image = [model.config.image_token_id] * _tokens_per_image(model)
    ids = [[one for part in row for one in (image if part == "i" else _words(generator))] for row in rows]
    length = max(map(len, ids))
    padded = torch.tensor([[0] * (length - len(row)) + row for row in ids])
    is_image = (padded == model.config.image_token_id).long()
    inputs = {"input_ids": padded, "attention_mask": (padded != 0).long(), **_pixels(model, num_images, generator)}
    takes = inspect.signature(type(model).forward).parameters
    return {**inputs, **{name: is_image for name in ("token_type_ids", "mm_token_type_ids") if name in takes}}


def _words(generator: torch.Generator) -> list[int]:
    return torch.randint(3, 100, (5,), generator=generator).tolist()


def _pixels(model: Any, num_images: int, generator: torch.Generator) -> dict[str, Tensor]:
    if not num_images:
        return {}
    takes = inspect.signature(type(model).forward).parameters
    vision = model.config.vision_config
    if "image_grid_thw" in takes:
        grid = torch.tensor([[1, 4, 4]] * num_images)
        width = 3 * vision.temporal_patch_size * vision.patch_size**2
        return {"pixel_values": torch.randn(16 * num_images, width, generator=generator), "image_grid_thw": grid}
    if "image_position_ids" in takes:
        places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(num_images, -1, -1)
        width = 3 * getattr(vision, "model_patch_size", vision.patch_size) ** 2
        pixels = torch.randn(num_images, len(places[0]), width, generator=generator)
        return {"pixel_values": pixels, "image_position_ids": places}
    size = vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]
    pixels = {"pixel_values": torch.randn(num_images, 3, size, size, generator=generator)}
    is_sized = "image_sizes" in takes and vision.model_type == "pixtral"
    return {**pixels, "image_sizes": torch.tensor([[size, size]] * num_images)} if is_sized else pixels


@torch.no_grad()
def _tokens_per_image(model: Any) -> int:
    """Returns in the place of how many tokens an image goes, as the model's own tower says."""
    found = model.get_image_features(**_pixels(model, 1, torch.Generator()))
    # Some project what the tower puts out elsewhere.
    features = found.last_hidden_state if found.pooler_output is None else found.pooler_output
    return sum(math.prod(one.shape[:-1]) for one in (features if isinstance(features, tuple | list) else [features]))
