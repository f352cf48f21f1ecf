"""The attention of models with remote blocks: it computes nothing, and makes no masks; servers do.

A model without remote blocks must not get it: trl, for one, loads a reference model "like" the one it trains.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from swarm_plugins.errors import UnsupportedError

ATTENTION_NAME = "swarm"
"""Of the implementation, in transformers' registries."""
PADDING = "swarm_padding"
"""Attribute of a mask: the padding mask that it was made of. ``generate()`` makes masks before it calls the decoder."""
SEEN = "swarm_seen"
"""Attribute of a mask of a model with images: a `Seen`."""
_WITH_IMAGES = "_images"
_NAMES = re.compile(f"{ATTENTION_NAME}(_local_.*)?({_WITH_IMAGES})?")
_ROWS = 512
"""Rows of a mask that are looked at together."""


class Seen(NamedTuple):
    """What a mask says about the order of tokens, apart from padding."""

    is_changed: bool
    """Whether the model has changed what follows from the order: tokens may then see later ones."""
    make: Callable[[], Tensor]
    """Returns which tokens each new one sees, ``[B, S, L]``, whatever a local cache has forgotten."""


def register_attention(local: str | None = None, *, has_images: bool = False) -> str:
    """Registers an attention implementation with transformers for a model with remote blocks; returns its name.

    The attention function itself never runs on a decoder layer.

    Args:
        local: The implementation that the model's local blocks run, whose masks are made. None: all blocks are remote.
        has_images: Whether the model may let tokens see later ones.
    """
    _refuse_whole_models()
    name = ATTENTION_NAME if local is None else f"{ATTENTION_NAME}_local_{local}"
    make: Callable[..., Any] = _no_mask if local is None else functools.partial(_local_mask, local)
    if has_images:
        name, make = f"{name}{_WITH_IMAGES}", functools.partial(_seen_mask, make)
    AttentionInterface.register(name, _attend)
    AttentionMaskInterface.register(name, make)
    return name


def refuse_continuous_batching(*_: Any, **__: Any) -> NoReturn:
    """Stands in for a model's ``init_continuous_batching``, which would replace the attention.

    Raises:
        UnsupportedError: Always.
    """
    raise UnsupportedError(
        "continuous batching (generate_batch) needs paged attention in this process, but the blocks run on servers; "
        "call generate() with a padded batch; in trl, leave use_transformers_continuous_batching=False"
    )


@functools.cache
def _refuse_whole_models() -> None:
    """Makes transformers refuse to load a whole model with this attention, before it downloads any weights."""
    original: Any = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]  # a class method

    @functools.wraps(original)
    def from_pretrained(cls: type[PreTrainedModel], name: Any = None, *args: Any, **kwargs: Any) -> Any:
        attention = kwargs.get("attn_implementation") or getattr(kwargs.get("config"), "_attn_implementation", None)
        if isinstance(attention, str) and _NAMES.fullmatch(attention):
            raise UnsupportedError(_whole_model(str(name)))
        return original(cls, name, *args, **kwargs)

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)  # type: ignore[assignment,method-assign]


def _whole_model(name: str) -> str:
    return (
        f"{name} would be loaded here as a whole, with the attention {ATTENTION_NAME!r} of a model whose blocks run on "
        "servers; if this is trl's reference model, give the trainer peft_config= (the reference is then the model "
        "without its adapter), or DPOTrainer a ref_model= from AutoSwarmModelForCausalLM.from_pretrained(); else leave "
        "out attn_implementation"
    )


def _attend(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Serves encoders next to the decoder, such as one of images; a decoder layer lacks its mask here."""
    if getattr(module, "is_causal", True):
        raise UnsupportedError(_whole_model("a model"))
    return sdpa_attention_forward(module, *args, **kwargs)


def _no_mask(
    *, batch_size: int, kv_length: int, attention_mask: Tensor | None = None, device: Any = None, **_: Any
) -> Tensor:
    """Returns a mask that hides nothing, one row for all queries; some families slice it or cast it."""
    mask = torch.ones(batch_size, 1, 1, kv_length, dtype=torch.bool, device=device)
    setattr(mask, PADDING, attention_mask)
    return mask


def _local_mask(local: str, *, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
    """Returns the mask of local blocks."""
    make: Callable[..., Any] = AttentionMaskInterface()[local]
    if int(kwargs["q_offset"]) + int(kwargs["q_length"]) != int(kwargs["kv_offset"]) + int(kwargs["kv_length"]):
        # A static cache with empty places; transformers knows it by `is_compileable`, which remote layers are not.
        kwargs["allow_is_causal_skip"] = False
    mask = make(attention_mask=attention_mask, **kwargs)
    if isinstance(mask, Tensor):
        setattr(mask, PADDING, attention_mask)
    return mask


def _seen_mask(
    make: Callable[..., Any],
    *,
    mask_function: Callable[..., Any],
    q_length: int,
    q_offset: int,
    allow_is_causal_skip: bool,
    **kwargs: Any,
) -> Any:
    """Returns a mask that also knows what tokens see."""
    sizes = {"q_length": q_length, "q_offset": q_offset}
    mask = make(mask_function=mask_function, allow_is_causal_skip=allow_is_causal_skip, **sizes, **kwargs)
    if isinstance(mask, Tensor):
        seen = functools.partial(_seen, mask_function, q_length=q_length, q_offset=int(q_offset), **kwargs)
        # Causal masks and windows may be skipped; what a model changes about them may not.
        setattr(mask, SEEN, Seen(not allow_is_causal_skip, seen))
    return mask


def _seen(
    mask_function: Callable[..., Any],
    *,
    batch_size: int,
    q_length: int,
    q_offset: int,
    use_vmap: bool = False,
    device: Any = None,
    **_: Any,
) -> Tensor:
    make: Callable[..., Any] = sdpa_mask
    parts = [
        make(
            batch_size,
            min(_ROWS, q_length - start),
            q_offset + q_length,
            q_offset=q_offset + start,
            mask_function=mask_function,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
        for start in range(0, q_length, _ROWS)
    ]
    return torch.cat([part[:, 0] for part in parts], dim=1)
