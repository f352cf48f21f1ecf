"""Every way of decoding that a remote model must do like a local one.

A mode takes a model and returns everything it said, as one list of numbers; the same call on two models that are
equal gives equal lists.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

Mode = Callable[[PreTrainedModel, PreTrainedModel], list[Any]]

NEW_TOKENS = 10
# The repeated piece gives prompt lookup something to find.
PROMPT = torch.tensor([[5, 17, 99, 23, 5, 17, 99, 23, 5, 17]])
PADDED = torch.tensor([[0, 0, 0, 11, 42, 7], [31, 64, 9, 88, 12, 101], [0, 3, 77, 14, 50, 60]])
PADDED_MASK = (PADDED != 0).long()
MODES: dict[str, Mode] = {}


def mode(run: Mode) -> Mode:
    """Adds a mode to the table under its function's name."""
    MODES[run.__name__] = run
    return run


def generate(model: PreTrainedModel, ids: Tensor = PROMPT, **options: Any) -> list[Any]:
    """Generates with a seed; greedy unless told otherwise."""
    torch.manual_seed(0)
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, **options}
    if "attention_mask" not in options and "inputs_embeds" not in options:
        options["attention_mask"] = torch.ones_like(ids)
    return model.generate(ids, pad_token_id=0, **options).tolist()


def padded(model: PreTrainedModel, **options: Any) -> list[Any]:
    """Generates for a batch with padding on the left."""
    return generate(model, PADDED, attention_mask=PADDED_MASK, **options)


@mode
def greedy(model: PreTrainedModel, _: PreTrainedModel) -> list[Any]:
    return generate(model)


@mode
def greedy_padded(model: PreTrainedModel, _: PreTrainedModel) -> list[Any]:
    return padded(model)


@mode
def sampling(model: PreTrainedModel, _: PreTrainedModel) -> list[Any]:
    return generate(model, do_sample=True, top_k=20, temperature=0.8)


@mode
def several_sequences(model: PreTrainedModel, _: PreTrainedModel) -> list[Any]:
    return generate(model, do_sample=True, num_return_sequences=3)


@mode
def beam(model: PreTrainedModel, _: PreTrainedModel) -> list[Any]:
    return generate(model, num_beams=4, num_return_sequences=2)


@mode
def beam_padded(model: PreTrainedModel, _: PreTrainedModel) -> list[Any]:
    return padded(model, num_beams=3)


@mode
def beam_sampling(model: PreTrainedModel, _: PreTrainedModel) -> list[Any]:
    return padded(model, num_beams=3, do_sample=True)


@mode
def prompt_lookup(model: PreTrainedModel, _: PreTrainedModel) -> list[Any]:
    return generate(model, prompt_lookup_num_tokens=3)


@mode
def assisted(model: PreTrainedModel, assistant: PreTrainedModel) -> list[Any]:
    return generate(model, assistant_model=assistant)


@mode
def assisted_by_itself(model: PreTrainedModel, _: PreTrainedModel) -> list[Any]:
    return generate(model, assistant_model=model)


@mode
def assisted_sampling(model: PreTrainedModel, assistant: PreTrainedModel) -> list[Any]:
    return generate(model, assistant_model=assistant, do_sample=True)


@mode
def without_cache(model: PreTrainedModel, _: PreTrainedModel) -> list[Any]:
    return padded(model, use_cache=False)


@mode
def prefill_in_chunks(model: PreTrainedModel, _: PreTrainedModel) -> list[Any]:
    return [generate(model, prefill_chunk_size=3), padded(model, prefill_chunk_size=4)]


@mode
def static_cache(model: PreTrainedModel, _: PreTrainedModel) -> list[Any]:
    return [generate(model, cache_implementation="static"), padded(model, cache_implementation="static")]


@mode
def dynamic_cache(model: PreTrainedModel, _: PreTrainedModel) -> list[Any]:
    return [generate(model, cache_implementation="dynamic"), padded(model, past_key_values=DynamicCache())]


@mode
def several_turns(model: PreTrainedModel, _: PreTrainedModel) -> list[Any]:
    return list(turns(model, DynamicCache(config=model.config)))


@mode
def copied_cache(model: PreTrainedModel, _: PreTrainedModel) -> list[Any]:
    cache = DynamicCache(config=model.config)
    start = model.generate(PROMPT, max_new_tokens=4, do_sample=False, past_key_values=cache, pad_token_id=0)
    answers = []
    for follow_up in (40, 90):
        ids = torch.cat([start, torch.tensor([[follow_up, 8]])], dim=1)
        answers.append(generate(model, ids, past_key_values=copy.deepcopy(cache)))
    # The copies have not changed the original.
    answers.append(generate(model, torch.cat([start, torch.tensor([[13]])], dim=1), past_key_values=cache))
    return answers


@mode
def streamer(model: PreTrainedModel, _: PreTrainedModel) -> list[Any]:
    heard = Ear()
    said = generate(model, streamer=heard)
    return [said, heard.tokens]


@mode
def from_embeddings(model: PreTrainedModel, _: PreTrainedModel) -> list[Any]:
    embedded = model.get_input_embeddings()(PADDED)
    torch.manual_seed(0)
    options = {"attention_mask": PADDED_MASK, "max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    return model.generate(inputs_embeds=embedded, **options).tolist()


@mode
def guided(model: PreTrainedModel, _: PreTrainedModel) -> list[Any]:
    # Classifier-free guidance keeps a second cache for the prompt without condition.
    return generate(model, guidance_scale=1.5)


def turns(model: PreTrainedModel, cache: DynamicCache) -> list[list[int]]:
    """Three turns of a conversation over one cache."""
    ids = PROMPT
    said = []
    for turn in range(3):
        ids = torch.tensor(generate(model, ids, past_key_values=cache, max_new_tokens=5))
        said.append(ids[0].tolist())
        ids = torch.cat([ids, torch.tensor([[30 + turn, 60 + turn]])], dim=1)
    return said


class Ear(BaseStreamer):
    """Notes what is streamed."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: Tensor) -> None:
        self.tokens.extend(value.flatten().tolist())

    def end(self) -> None:
        self.tokens.append(-1)
