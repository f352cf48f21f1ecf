"""Adapters on copies of a model: a fresh LoRA by kinds of modules, another method by its config, or a saved one."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from torch import nn

from swarm_plugins.backbone.twin import twin
from swarm_plugins.callbacks.loading import DRAWING, load_adapter
from swarm_plugins.checkpoint import layer_list_name
from swarm_plugins.errors import ConfigError, one_line
from swarm_plugins.hub.adapter_settings import check_config
from swarm_plugins.moe import EXPERT_PARAMETERS, is_fused_experts
from swarm_plugins.noise import without_tied_remark
from swarm_plugins.tuning.snapshots import own_bytes

PEFT_CONFIG = "peft_config"
"""How a request calls the settings of another kind of adapter."""
MAX_RANK = 256
_ALPHA = 32
"""At any rank, as the protocol has it: a learning rate fits all ranks (LoRA Without Regret, Schulman et al. 2025)."""
_MIXERS = ("attn", "attention", "mixer", "mamba", "conv", "temporal_block", "mlstm_layer")
_MLPS = {"mlp", "experts", "shared_experts", "up_proj", "down_proj"}
"""Also inside a mixer: Nemotron-H gives that name to the content of any layer."""
_ROUTERS = {"router", "gate", "shared_expert_gate"}
_NOT_CALLED = {"dt_proj", "weights_proj"}
"""Their owners read the weights directly (Mamba, DeepSeek-V3.2), so an adapter would do nothing."""
_WITHOUT_OUT_PROJ = {"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"}
"""Model types whose ``out_proj`` PEFT refuses: CUDA kernels read its weight."""


def new_lora(
    base: Any,
    *,
    rank: int,
    seed: int | None = None,
    attention: bool = True,
    mlp: bool = True,
    unembed: bool = True,
    check: Callable[[int], object] | None = None,
) -> PeftModel:
    """Returns a model with a fresh LoRA that shares the weights of ``base``, which stays as it is.

    Args:
        base: A causal language model.
        rank: Rank of every product.
        seed: Of the factors' random start. None: another one each time.
        attention: Adapt the linear layers of attention, and of what stands in its place (Mamba, convolutions).
        mlp: Adapt the MLPs, experts among them.
        unembed: Adapt the output layer.
        check: Called with the bytes of the adapter before they are allocated; it raises if they are too many.

    Raises:
        ConfigError: If the rank is out of bounds, nothing would be trained, or PEFT has no LoRA for a module.
    """
    if not 1 <= rank <= MAX_RANK:
        raise ConfigError(f"a LoRA of rank {rank} cannot be trained here: 1 to {MAX_RANK} are possible")
    modules, parameters = _targets(base, attention=attention, mlp=mlp, unembed=unembed)
    if not modules and not parameters:
        raise ConfigError(
            "no module would be trained: choose at least one of attention, MLPs and the output layer; layers stored as "
            "Conv1D (GPT-2) take no adapter here"
        )
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=_ALPHA,
        target_modules=modules,
        target_parameters=parameters or None,
    )
    with _peft_errors(f"a LoRA of rank {rank}"):
        return _with_adapter(base, config, seed, check)


def new_adapter(
    base: Any, settings: str, *, seed: int | None = None, check: Callable[[int], object] | None = None
) -> PeftModel:
    """Returns a model with a fresh adapter of any kind that can share its base, which stays as it is.

    Args:
        base: A causal language model.
        settings: PEFT's config of the adapter in JSON, as in ``adapter_config.json``; names of modules in full or by
            their ends, no patterns.
        seed: Of its random start. None: another one each time.
        check: Called with the bytes of the adapter before they are allocated; it raises if they are too many.

    Raises:
        ConfigError: If it is not such a config, or cannot be put into this model.
        CheckpointError: If the kind of adapter, or a setting, would change the base for others or has no bound.
    """
    try:
        found = json.loads(settings)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{PEFT_CONFIG} is not JSON ({one_line(exc)})") from exc
    check_config(found, PEFT_CONFIG, is_shared=True)
    if found.get("prompt_tuning_init") == "TEXT":
        raise ConfigError(
            f"{PEFT_CONFIG} starts a prompt from a text, for which PEFT would load the tokenizer that it names here: "
            "use prompt_tuning_init='RANDOM' or 'SAMPLE_VOCAB'"
        )
    with _peft_errors(PEFT_CONFIG):
        # PEFT saves configs with inference_mode=true.
        found |= {"task_type": "CAUSAL_LM", "inference_mode": False}
        config = PEFT_TYPE_TO_CONFIG_MAPPING[found.pop("peft_type")](**found)
        return _with_adapter(base, config, seed, check)


def saved_adapter(base: Any, folder: Path, *, is_trainable: bool) -> PeftModel:
    """Returns a model with an adapter that was saved, on a copy of ``base`` that shares its weights.

    Raises:
        ConfigError: If it was made for another version of the base.
        CheckpointError: If it does not fit the model.
        UnsupportedError: If it is to be trained, and its file has only what its encoder has made.
    """
    return load_adapter(twin(base), folder, is_trainable=is_trainable, is_shared=True).eval()


@contextlib.contextmanager
def _peft_errors(what: str) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, KeyError, AttributeError) as exc:
        raise ConfigError(f"{what} does not fit this model ({one_line(exc, with_kind=True)})") from exc


def _with_adapter(base: Any, config: PeftConfig, seed: int | None, check: Callable[[int], object] | None) -> PeftModel:
    if check is not None:
        check(_adapter_bytes(base, config))
    with DRAWING, torch.random.fork_rng(devices=[]), without_tied_remark():
        if seed is None:
            torch.seed()
        else:
            torch.manual_seed(seed)
        model = get_peft_model(twin(base), config)
    if not isinstance(model, PeftModel):
        raise TypeError(f"PEFT returned {type(model).__name__}")
    return model.eval()


def _adapter_bytes(base: Any, config: PeftConfig) -> int:
    """Returns what an adapter takes, of whatever kind: PEFT makes it on a copy of the base that has shapes alone.

    By a device that is this thread's: PEFT's own way to make adapters without memory changes torch for all threads.
    """
    outline = _outline(base)
    before = own_bytes(outline, nn.Module())
    with torch.device("meta"), without_tied_remark():
        return own_bytes(get_peft_model(outline, copy.deepcopy(config)), nn.Module()) - before


def _outline(base: Any) -> Any:
    """Returns a copy of a model's structure with shapes in place of its tensors."""
    shapes: dict[int, Any] = {}
    for one in itertools.chain(base.parameters(), base.buffers()):
        shape = torch.empty(one.shape, dtype=one.dtype, device="meta")
        shapes[id(one)] = nn.Parameter(shape, requires_grad=False) if isinstance(one, nn.Parameter) else shape
    return copy.deepcopy(base, shapes)


def _targets(base: Any, *, attention: bool, mlp: bool, unembed: bool) -> tuple[list[str], list[str]]:
    """Returns the names of linear layers, and of experts' parameters."""
    layers = f"{layer_list_name(base)}."
    head = base.get_output_embeddings()
    left_out = _ROUTERS | _NOT_CALLED | ({"out_proj"} if base.config.model_type in _WITHOUT_OUT_PROJ else set())
    modules, parameters = [], []
    for path, module in base.named_modules():
        parts = path.removeprefix(layers).split(".")
        if module is head:
            modules += [path] if unembed else []
        elif path.startswith(layers) and (attention if _is_mixer(parts) else mlp):
            if is_fused_experts(module):
                parameters += [f"{path}.{name}" for name in EXPERT_PARAMETERS if hasattr(module, name)]
            elif isinstance(module, nn.Linear) and left_out.isdisjoint(parts):
                modules.append(path)
    return modules, parameters


def _is_mixer(parts: list[str]) -> bool:
    return _MLPS.isdisjoint(parts) and any(word in part for part in parts for word in _MIXERS)
