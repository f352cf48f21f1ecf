"""Speculative decoding for ``generate(custom_generate=...)``."""

from __future__ import annotations

import inspect
import time
from types import MethodType
from typing import Any, cast

import torch
from torch import LongTensor, Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils.generic import ModelOutput

from swarm_plugins.backbone.adapter_reader import begins_late
from swarm_plugins.backbone.local_layers import keeps_states
from swarm_plugins.errors import ConfigError, UnsupportedError
from swarm_plugins.rotary import whole_beyond
from swarm_plugins.speculation.caches import CACHE_NAMES, cache_name, fixed_layers, seen_by
from swarm_plugins.speculation.choice import Chosen, choose_greedy, choose_sampled, processed
from swarm_plugins.speculation.drafts import Drafter, LookupDrafter, ModelDrafter
from swarm_plugins.speculation.pace import Counts, Pace
from swarm_plugins.speculation.rows import Places, Texts

LOOKUP = "lookup"
_PADDING_TOKENS = 512
"""Models of a family pad the same vocabulary to different multiples."""
_STATEFUL_PROCESSORS = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)
"""They keep state between calls, and could not forget rejected tokens."""


class Speculation:
    """Decodes several tokens a trip; pass it to ``generate(custom_generate=...)``.

    Greedy decoding gives the tokens that it gives without a draft, sampling the same distribution. How many tokens are
    drafted follows from the measured times and the draft's success, which an instance remembers from call to call. Rows
    of a batch accept different numbers of tokens.

    Args:
        draft: A small model with the same tokens, or ``"lookup"`` to draft from repetitions in the text.
        max_tokens: The most tokens to draft in a round.

    Raises:
        ConfigError: If the draft is neither a model nor ``"lookup"``, or ``max_tokens`` is not a whole number of 1 or
            more.
    """

    def __init__(self, draft: PreTrainedModel | str, *, max_tokens: int = 32) -> None:
        if draft != LOOKUP and not isinstance(draft, torch.nn.Module):
            raise ConfigError(f"invalid draft {draft!r}: expected a model, or {LOOKUP!r} to draft from the text")
        if type(max_tokens) is not int or max_tokens < 1:
            raise ConfigError(f"invalid max_tokens {max_tokens!r}: expected a whole number, 1 or more")
        self.draft = draft
        self.max_tokens = max_tokens
        self.counts = Counts()
        """What it did so far."""
        self._pace = Pace()

    @torch.no_grad()
    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Decodes as ``generate()`` asks it to.

        transformers hands no streamer to a ``custom_generate``; bind one with ``functools.partial``.

        Args:
            model: The model to decode with.
            input_ids: ``[B, T]``, padded on the left.
            logits_processor: Changes logits before a token is chosen, by the text before it alone.
            stopping_criteria: Say when a row ends.
            generation_config: Settings of this generation.
            streamer: Gets the tokens of a single row as they come.
            **model_kwargs: Cache, mask and positions, and whatever else the model's forward takes.

        Raises:
            ConfigError: If the draft model has another vocabulary, or the settings exclude speculation.
            UnsupportedError: If the model cannot take back tokens.
        """
        self._check(model, input_ids, generation_config, model_kwargs, streamer)
        _check_processors(logits_processor)
        drafter = self._drafter(model, logits_processor, generation_config)
        if streamer is not None:
            streamer.put(input_ids.cpu())
        run = _Run(self, model, input_ids, generation_config, model_kwargs, logits_processor, drafter)
        while run.texts.active.any():
            new = run.round(stopping_criteria)
            if streamer is not None:
                streamer.put(torch.tensor([new]))
        if streamer is not None:
            streamer.end()
        if not generation_config.return_dict_in_generate:
            return run.texts.ids
        cache = run.kwargs[run.cache_name] if len(run.texts.lengths) == 1 else None
        return GenerateDecoderOnlyOutput(sequences=cast("LongTensor", run.texts.ids), past_key_values=cache)

    def _drafter(self, model: PreTrainedModel, processors: LogitsProcessorList, config: GenerationConfig) -> Drafter:
        if isinstance(self.draft, str):
            return LookupDrafter()
        return ModelDrafter(
            self.draft,
            processors,
            vocab_size=_vocab_size(model),
            do_sample=bool(config.do_sample),
            ends=_token_list(config.eos_token_id),
        )

    def _check(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        config: GenerationConfig,
        kwargs: dict[str, Any],
        streamer: BaseStreamer | None,
    ) -> None:
        if not isinstance(self.draft, str):
            check_vocabulary(model, self.draft)
        if begins_late(model):
            raise ConfigError(
                "speculation cannot work with aLoRA, which counts from the end of a prompt, and of drafts with it: "
                "decode without a draft"
            )
        if model.config.is_encoder_decoder:
            raise UnsupportedError(f"{type(model).__name__} has an encoder: speculation is for decoders alone")
        if not any(name in inspect.signature(model.forward).parameters for name in CACHE_NAMES):
            raise UnsupportedError(
                f"{type(model).__name__} takes no cache: each draft would run the whole text again, decode without one"
            )
        if getattr(model, "_is_stateful", False):
            raise UnsupportedError(
                f"{type(model).__name__} keeps states here that cannot take back rejected tokens: decode without a "
                "draft, or leave all its blocks to servers, which can"
            )
        if (config.num_beams or 1) > 1:
            raise ConfigError(f"speculation needs num_beams=1, got {config.num_beams}: beams accept no common draft")
        wanted = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
        asked = [name for name in wanted if getattr(config, name, None)]
        if asked:
            raise ConfigError(f"speculation returns tokens only: leave out {', '.join(asked)}, or decode without it")
        _check_text(input_ids, config, kwargs.get("attention_mask"))
        _check_cache(model, kwargs)
        if streamer is not None and input_ids.shape[0] > 1:
            raise ConfigError(f"a streamer takes one row, got {input_ids.shape[0]}: generate them one by one")


def _check_text(input_ids: Tensor, config: GenerationConfig, mask: Tensor | None) -> None:
    num_given = input_ids.shape[1]
    if num_given == 0:
        raise ConfigError("speculation needs input_ids, got none: a draft cannot continue inputs_embeds")
    # transformers removes a mask of ones, and keeps its length.
    length = (getattr(config, "_mask_length", None) or num_given) if mask is None else mask.shape[1]
    if length != num_given:
        raise ConfigError(
            f"speculation needs the whole text, got {num_given} input_ids and a mask for {length} tokens: give those "
            "in the cache, too"
        )


def _check_processors(processors: LogitsProcessorList) -> None:
    stateful = [type(one).__name__ for one in processors if isinstance(one, _STATEFUL_PROCESSORS)]
    if stateful:
        raise ConfigError(
            f"speculation cannot work with {', '.join(stateful)} (of guidance_scale or watermarking_config), which "
            "would count rejected drafts as text: leave it out, or decode without a draft"
        )


def _check_cache(model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    cache = next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)
    if not kwargs.get("use_cache") or cache is None:
        raise ConfigError("speculation needs a KV cache: leave use_cache=True")
    if fixed := fixed_layers(cache, model):
        raise ConfigError(
            f"speculation needs a KV cache that can forget rejected tokens, got one with {', '.join(fixed)}: leave out "
            "cache_implementation, or pass a DynamicCache"
        )


def check_vocabulary(model: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Raises ConfigError if the vocabularies differ by more than the rows that pad them."""
    sizes = _vocab_size(model), _vocab_size(draft)
    if abs(sizes[0] - sizes[1]) > _PADDING_TOKENS:
        raise ConfigError(
            f"the draft model has a vocabulary of {sizes[1]} tokens and the model of {sizes[0]}: a draft must share "
            "the model's tokenizer; choose a smaller model of the same family, or draft='lookup'"
        )


def _vocab_size(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config(decoder=True).vocab_size)


class _Run:
    """One call of ``generate()``."""

    def __init__(
        self,
        owner: Speculation,
        model: PreTrainedModel,
        input_ids: Tensor,
        config: GenerationConfig,
        model_kwargs: dict[str, Any],
        processors: LogitsProcessorList,
        drafter: Drafter,
    ) -> None:
        self._owner, self._model, self._config = owner, model, config
        self._processors, self._drafter = processors, drafter
        self.kwargs = model_kwargs
        padding = _token_list(config.pad_token_id) + _token_list(config.eos_token_id)
        self.texts = Texts(input_ids, next(iter(padding), 0))
        self._places = Places(
            input_ids, model_kwargs.pop("attention_mask", None), model_kwargs.pop("position_ids", None)
        )
        self.cache_name = cache_name(model_kwargs)
        cache = model_kwargs[self.cache_name]
        cache.activate_past_recording()
        self._seen = seen_by(cache)
        self._is_first = True
        # Such as images or embeddings of the prompt, which do not cover drafts.
        self._has_prompt_inputs = any(isinstance(one, (Tensor, ModelOutput)) for one in model_kwargs.values())
        self._num_virtual = 0
        """Places of the cache that hold no tokens: before the text, from PEFT's prompt and prefix tuning."""
        self._takes_positions = self._places.positions is not None
        self._border = whole_beyond(model.config.get_text_config(decoder=True))
        # A window counts places, so rows with holes would see less than their window; states take in each place; and
        # a batch has one kind of rotary frequencies.
        self._is_dense = (
            _has_window(model) or self._border is not None or any(keeps_states(layer) for layer in cache.layers)
        )

    def round(self, stopping_criteria: StoppingCriteriaList) -> list[int]:
        """Drafts, verifies and takes over; returns the new tokens of the first row."""
        started = time.perf_counter()
        texts, pace = self.texts, self._owner._pace
        before = list(texts.lengths)
        rows = texts.active_rows
        draft = self._drafter.propose(texts, self._places, self._limit(), pace)
        sent = time.perf_counter()
        logits = self._verify(self._places.with_drafts(draft.tokens), draft.tokens.shape[1] + 1)
        trip_s = time.perf_counter() - sent
        logits = processed(logits, texts, draft.tokens, self._processors)
        if self._config.do_sample:
            chosen = choose_sampled(logits, draft.tokens, draft.probabilities)
        else:
            chosen = choose_greedy(logits, draft.tokens)
        for row in rows:
            pace.saw_tokens(draft.confidences[row].tolist(), int(chosen.counts[row]))
        self._take(chosen, draft.tokens, stopping_criteria)
        new = sum(texts.lengths) - sum(before)
        if not self._is_first:
            pace.saw_round(draft.tokens.shape[1] + 1, trip_s, time.perf_counter() - started, new)
        self._is_first = False
        counts = self._owner.counts
        counts.rounds += 1
        counts.tokens += new
        counts.row_rounds += len(rows)
        counts.drafted += len(rows) * draft.tokens.shape[1]
        counts.accepted += new - len(rows)
        return texts.ids[0, before[0] : texts.lengths[0]].tolist()

    def _limit(self) -> int:
        if self._is_first and self._has_prompt_inputs:
            return 0
        longest = max(self.texts.lengths[row] for row in self.texts.active_rows)
        left = int(self._config.max_length) - longest - 1
        if self._border is not None:
            # A draft must not carry a short text past the length where its frequencies change.
            room = self._border - self._places.length - self._num_virtual
            left = min(left, room) if room >= 0 else left
        return self._owner._pace.limit(max(0, min(self._owner.max_tokens, left)))

    def _verify(self, places: Places, width: int) -> Tensor:
        """Runs all places that the cache has not seen; returns the logits of the last, ``[B, width, V]``."""
        model: Any = self._model
        inputs = self._prepared(places)
        self._takes_positions = inputs.get("position_ids") is not None
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = width
        outputs = model(**inputs, return_dict=True)
        if self._is_first:
            self._num_virtual = max(0, seen_by(outputs[self.cache_name]) - places.length)
        self.kwargs[self.cache_name] = outputs[self.cache_name]
        logits: Tensor = outputs.logits[:, -width:].float().to(places.tokens.device)
        return logits

    def _prepared(self, places: Places) -> dict[str, Any]:
        """Returns the model's arguments for all places that the cache has not seen."""
        options = dict(self.kwargs)
        model: Any = self._model
        prepare, mask, positions = model.prepare_inputs_for_generation, places.mask, places.positions
        if self._num_virtual:
            # PEFT replaces the method to insert what it has learned; after that it would pass on a single token.
            prepare = MethodType(type(model).prepare_inputs_for_generation, model)
            if mask is not None:
                mask = torch.cat((mask.new_ones(mask.shape[0], self._num_virtual), mask), dim=1)
            positions = positions + self._num_virtual if positions is not None and self._takes_positions else None
        if positions is not None:
            options["position_ids"] = positions
        types = options.get("token_type_ids")
        if types is not None:
            # As `generate()` goes on: new tokens are of the last one's type.
            new = types[:, -1:].expand(-1, max(0, places.length - types.shape[1]))
            options["token_type_ids"] = torch.cat((types, new), dim=1)
        inputs: dict[str, Any] = prepare(
            places.tokens,
            next_sequence_length=places.length - self._seen,
            attention_mask=mask,
            is_first_iteration=self._is_first,
            **options,
        )
        cache = inputs.get(self.cache_name)
        if cache is None:
            # Phi-3 drops it where its frequencies change, and runs the whole text again.
            config = model.config.get_text_config(decoder=True)
            cache = inputs[self.cache_name] = DynamicCache(config=config)
        if cache is not self.kwargs[self.cache_name]:
            cache.activate_past_recording()
        return inputs

    def _take(self, chosen: Chosen, drafts: Tensor, stopping_criteria: StoppingCriteriaList) -> None:
        """Appends the accepted tokens and the one after them; forgets the rest."""
        texts = self.texts
        counts = torch.where(texts.active.to(chosen.counts.device), chosen.counts, 0)
        if self._is_dense or not self._takes_positions:
            counts = torch.where(texts.active.to(counts.device), counts[texts.active].min(), 0)
        before = list(texts.lengths)
        for place in range(int(counts.max()) + 1):
            for row in texts.active_rows:
                if place <= counts[row]:
                    texts.append(row, int(chosen.tokens[row, place]))
            self._stop([row for row in texts.active_rows if place <= counts[row]], stopping_criteria)
        # If a row ended within its drafts, the cache keeps only those that are in the text.
        new = counts.new_tensor(texts.lengths) - counts.new_tensor(before)
        counts = (new - 1).clamp(min=0)
        newest = chosen.tokens.gather(1, counts[:, None])[:, 0]
        places = self._places.accepted(drafts, counts, newest, texts.active.to(counts.device))
        self.kwargs[self.cache_name].crop(places.length - 1 - self._places.length - drafts.shape[1])
        self._drafter.forget(places.length - 1)
        self._seen, self._places = places.length - 1, places

    def _stop(self, rows: list[int], stopping_criteria: StoppingCriteriaList) -> None:
        """Ends rows with a new token that fulfil a criterion; criteria want texts of equal length."""
        for length in {self.texts.lengths[row] for row in rows}:
            ended = stopping_criteria(self.texts.ids[:, :length], None)
            for row in rows:
                if self.texts.lengths[row] == length and ended[row]:
                    self.texts.active[row] = False


def _has_window(model: PreTrainedModel) -> bool:
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return any(kind != "full_attention" for kind in kinds)
    return bool(getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None))


def _token_list(tokens: int | list[int] | None) -> list[int]:
    return [] if tokens is None else list(tokens) if isinstance(tokens, list) else [tokens]
