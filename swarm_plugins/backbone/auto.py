"""`AutoSwarmModel...`: loads HF's own class with its decoder layers on the swarm."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)

from swarm_plugins.backbone.context import OnThisMachine, resolve_place
from swarm_plugins.backbone.here import load_here
from swarm_plugins.backbone.injection import watch_injection
from swarm_plugins.backbone.loading import load_remote
from swarm_plugins.backbone.local_checks import check_local_blocks
from swarm_plugins.backbone.stack import RemoteStack
from swarm_plugins.backbone.trial import try_family
from swarm_plugins.borders import check_borders, tied_blocks
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.checkpoint.loading import class_for_task
from swarm_plugins.checkpoint.partition import num_blocks_of
from swarm_plugins.client.config import SwarmConfig
from swarm_plugins.client.connection import SwarmConnection
from swarm_plugins.errors import ConfigError
from swarm_plugins.model_names import expanded
from swarm_plugins.offload.config import OffloadConfig
from swarm_plugins.weights.widths import QUANT_METHOD


class _AutoSwarm:
    """Shared by the four classes."""

    _mapping: ClassVar[Mapping[Any, Any]]
    _what: ClassVar[str]

    def __init__(self) -> None:
        raise TypeError(f"{type(self).__name__} is not instantiated; call {type(self).__name__}.from_pretrained(...)")

    @classmethod
    def from_pretrained(
        cls,
        name_or_dir: str | Path,
        *,
        revision: str | None = None,
        initial_peers: Sequence[str] | str | None = None,
        swarm: SwarmConfig | None = None,
        offload: OffloadConfig | str | None = None,
        dtype: torch.dtype | str | None = None,
        device: str | torch.device | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        connection: SwarmConnection | None = None,
        local_blocks: tuple[int, int] | None = None,
        **config_changes: Any,
    ) -> PreTrainedModel:
        """Returns the model in HF's own class; its decoder layers run on servers of the same model version, or here.

        On a swarm, embeddings, final norm, head and ``local_blocks`` are local; only they are downloaded and read.
        Everything else works as in transformers: ``generate()``, PEFT, any Trainer.

        ``state_dict`` returns only the local weights (such as a trained head); to restore them, load the model by its
        name and call ``load_state_dict``. ``save_pretrained`` writes what it is given as ``state_dict``, or the adapter
        of ``add_adapter``, and is refused without either. PEFT saves its own adapters.

        Args:
            name_or_dir: Id of a repository on the Hub, or a directory.
            revision: Branch, tag or commit on the Hub.
            initial_peers: Addresses to join the swarm through. None: the active strategy's, else the environment
                variable ``SWARM_INITIAL_PEERS``.
            swarm: Settings of the client: deadlines, retries, codec.
            offload: Runs all blocks on this machine: an `OffloadConfig`, or its text such as ``fast=8GB``, leaves the
                experts of a mixture on disk (`load_offloaded`); ``none`` has all in memory. None: as the active
                strategy or the environment variable ``SWARM_OFFLOAD`` says, else on a swarm.
            dtype: Floating type of local weights and of the hidden states sent. None: the checkpoint's.
            device: Device of local weights and adapters; the CPU by default.
            token: Access token of the Hub.
            cache_dir: Cache of the Hub's files.
            connection: A connection to use instead of peers.
            local_blocks: How many blocks at the start and at the end run here. None: as ``swarm`` says.
            **config_changes: Settings of the model's config that affect the client, such as ``num_labels``.

        Raises:
            ConfigError: If no place is given, or two, a setting is wrong or the model does not exist.
            CheckpointError: If the client's share of the weights cannot be read.
            UnsupportedError: If the architecture cannot have remote blocks, or the model no offloaded ones.
            CapacityError: If a budget of ``offload`` is too small.
            TransportError: If the swarm cannot be joined.
        """
        name = str(expanded(name_or_dir))  # as PEFT writes it into an adapter's config
        settings = None if connection is not None else resolve_place(initial_peers, swarm, offload)
        if isinstance(settings, OnThisMachine):
            checkpoint = Checkpoint.open(name_or_dir, revision=revision, token=token, cache_dir=cache_dir)
            _check_changes(config_changes, checkpoint.config, _INSTEAD_HERE)
            return load_here(
                class_for_task(checkpoint.config, cls._what, cls._mapping),
                checkpoint,
                settings,
                name_or_dir=name,
                dtype=dtype,
                device=device,
                config_changes=config_changes,
                hub={"revision": revision, "token": token, "cache_dir": cache_dir},
            )
        config = SwarmConfig() if connection is None else connection.config
        config = config if settings is None else settings.config
        if local_blocks is not None:
            config = dataclasses.replace(config, local_blocks=local_blocks)
        checkpoint = Checkpoint.open(name_or_dir, revision=revision, token=token, cache_dir=cache_dir)
        _check_not_store(checkpoint)
        _check_changes(config_changes, checkpoint.config, _INSTEAD)
        base_class = class_for_task(checkpoint.config, cls._what, cls._mapping)
        num_blocks = num_blocks_of(checkpoint.config)
        check_local_blocks(config.local_blocks, num_blocks, checkpoint.name)
        tied = tied_blocks(checkpoint.config)
        first, last = config.local_blocks
        check_borders(range(first, num_blocks - last), tied, num_blocks)
        try_family(checkpoint.config, checkpoint.name)
        stack = RemoteStack(
            version=checkpoint.version,
            num_blocks=num_blocks,
            tied=tied,
            local_blocks=config.local_blocks,
            settings=settings,
            connection=connection,
            model=name,
        )
        # Joins now and not at the first step: a wrong address or a missing block shows before weights are read.
        stack.check()
        watch_injection()
        return load_remote(
            base_class,
            checkpoint,
            stack,
            name=name,
            dtype=dtype,
            device=str(device or "cpu"),
            config_changes=config_changes,
        )


_MAX_CHARS = 300
_CLIENT_SETTINGS = frozenset({
    "bos_token_id",
    "classifier_dropout",
    "eos_token_id",
    "id2label",
    "label2id",
    "num_labels",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "problem_type",
    "return_dict",
    "router_aux_loss_coef",
    "use_cache",
})  # fmt: skip
_WIDTH = "each server chooses the width of its blocks (swarm serve --quantization int8); leave it out"
_INSTEAD = {
    "attn_implementation": "servers choose how their blocks attend; leave it out",
    "device_map": "blocks are on servers, and device= says where the weights of this side go; leave it out",
    "load_in_4bit": _WIDTH,
    "load_in_8bit": _WIDTH,
    "low_cpu_mem_usage": "only the weights of this side are read in any case; leave it out",
    "max_memory": "blocks are on servers, which have limits of their own; leave it out",
    "quantization_config": _WIDTH,
    "torch_dtype": "its name is dtype",
    "trust_remote_code": "code out of a repository is never run, only transformers' own classes are; leave it out",
}
"""What to do instead of arguments that transformers' ``from_pretrained`` takes."""
_WIDTH_HERE = "experts are kept in few bits by offload='fast=8GB,bits=4'; leave it out"
_INSTEAD_HERE = _INSTEAD | {
    "attn_implementation": "blocks attend as transformers chooses for this machine; leave it out",
    "device_map": "device= says where the model runs, and offload='fast=8GB' leaves experts on disk; leave it out",
    "load_in_4bit": _WIDTH_HERE,
    "load_in_8bit": _WIDTH_HERE,
    "max_memory": "offload='fast=8GB' bounds the memory of experts; leave it out",
    "quantization_config": _WIDTH_HERE,
}
"""The same where blocks run on this machine."""


def _check_not_store(checkpoint: Checkpoint) -> None:
    """Refuses a quantized store: servers announce its blocks under the original model."""
    quantization = getattr(checkpoint.config, "quantization_config", None)
    if isinstance(quantization, Mapping) and quantization.get("quant_method") == QUANT_METHOD:
        base = str(quantization.get("base"))[:_MAX_CHARS]
        raise ConfigError(
            f"{checkpoint.name} is a quantized store: servers announce its blocks as blocks of {base!r}; "
            "load that model instead"
        )


def _check_changes(changes: Mapping[str, Any], config: PreTrainedConfig, instead: Mapping[str, str]) -> None:
    for name in changes:
        if name in _CLIENT_SETTINGS:
            continue
        if name in instead:
            raise ConfigError(f"{name!r} is not taken here: {instead[name]}")
        allowed = f"supported settings: {', '.join(sorted(_CLIENT_SETTINGS))}"
        if not hasattr(config, name):
            raise ConfigError(
                f"unknown argument {name!r}: neither an argument of from_pretrained nor a setting of "
                f"{type(config).__name__}; {allowed}"
            )
        raise ConfigError(f"{name!r} cannot be changed here: blocks run as the checkpoint says; {allowed}")


class AutoSwarmModel(_AutoSwarm):
    """The base model, without a head, with remote blocks."""

    _mapping = MODEL_MAPPING
    _what = "base model"


class AutoSwarmModelForCausalLM(_AutoSwarm):
    """A causal language model with remote blocks."""

    _mapping = MODEL_FOR_CAUSAL_LM_MAPPING
    _what = "causal language model"


class AutoSwarmModelForImageTextToText(_AutoSwarm):
    """A model that reads images and text, with the blocks of its language model remote; its tower is local."""

    _mapping = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    _what = "model for images and text"


class AutoSwarmModelForSequenceClassification(_AutoSwarm):
    """A sequence classifier with remote blocks; its head is local and trainable."""

    _mapping = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    _what = "sequence classifier"
