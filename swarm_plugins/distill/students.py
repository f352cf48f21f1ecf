"""Makes a student: the teacher's class with some of its layers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, PreTrainedConfig, PreTrainedModel

from swarm_plugins.checkpoint import (
    Checkpoint,
    block_tensors,
    client_tensors,
    find_layers,
    layer_list_name,
    layer_prefix,
    model_from_tensors,
)
from swarm_plugins.checkpoint.loading import class_for_task, take_generation_config
from swarm_plugins.checkpoint.partition import places_in_blocks
from swarm_plugins.distill.config_cut import cut_config, kept_layers
from swarm_plugins.distill.pair import name_of, public_name
from swarm_plugins.errors import ConfigError, UnsupportedError, one_line


def make_student(
    teacher: PreTrainedModel | str | Path,
    *,
    keep_layers: Sequence[int] | None = None,
    depth: int | None = None,
    revision: str | None = None,
    dtype: torch.dtype | str = "auto",
) -> PreTrainedModel:
    """Returns a shallower copy of a model: same class, some of its layers, embeddings, final norm and head.

    The student shares no memory with the teacher; all its weights require gradients. ``config.distillation`` records
    where it comes from.

    Args:
        teacher: A model of transformers with decoder layers; or a directory or Hub id, of which only the kept parts are
            read.
        keep_layers: Indices of the layers to keep, ascending.
        depth: Instead: how many layers to keep, evenly spread from the first to the last.
        revision: Branch, tag or commit of a teacher on the Hub.
        dtype: Floating type of a student that is read from files; ``auto``: the checkpoint's.

    Returns:
        The student, in training mode: Lightning keeps the mode, and a mixture of experts balances its load in this one.

    Raises:
        ConfigError: If the layers do not exist, or the teacher's weights are not in memory.
        CheckpointError: If a file of the teacher cannot be read.
        UnsupportedError: If the teacher has no single list of decoder layers, or the kept layers cannot be described by
            its config.
    """
    if isinstance(teacher, str | Path):
        student = _from_files(Checkpoint.open(teacher, revision=revision), keep_layers, depth, dtype)
    elif isinstance(teacher, PreTrainedModel):
        if revision is not None or dtype != "auto":
            raise ConfigError(
                f"revision={revision!r}, dtype={dtype!r} are for a teacher that is read from files; leave them out"
            )
        student = _from_model(teacher, keep_layers, depth)
    else:
        raise ConfigError(
            f"teacher is a {type(teacher).__name__}; expected a model of transformers (of a PEFT model, "
            "merge_and_unload() returns one), a directory or an id on the Hub"
        )
    student.train()
    return student


def _from_model(teacher: PreTrainedModel, keep_layers: Sequence[int] | None, depth: int | None) -> PreTrainedModel:
    path = layer_list_name(teacher)
    kept = kept_layers(len(find_layers(teacher)), keep_layers, depth)
    _check_in_memory(teacher)
    student = _student_on_meta(type(teacher), cut_config(teacher.config, kept), kept)
    check_same_layers(student, teacher, kept)
    for own, old in _names(student, path, kept):
        _put(student, own, _tensor(teacher, old).detach().clone())
    student.tie_weights()
    student.config.distillation = _origin(public_name(name_of(teacher)), None, kept)
    if teacher.can_generate():
        student.generation_config = copy.deepcopy(teacher.generation_config)
    return student


def _from_files(
    checkpoint: Checkpoint, keep_layers: Sequence[int] | None, depth: int | None, dtype: torch.dtype | str
) -> PreTrainedModel:
    checkpoint.refuse_gguf("make a student of it")
    model_class = class_for_task(checkpoint.config, "language model", MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING)
    hollow = _on_meta(model_class, checkpoint.config)
    path = layer_list_name(hollow)
    kept = kept_layers(len(find_layers(hollow)), keep_layers, depth)
    config = cut_config(checkpoint.config, kept)
    check_same_layers(_student_on_meta(model_class, config, kept), hollow, kept)
    tensors = checkpoint.read(client_tensors(checkpoint, path))
    prefix, places = layer_prefix(checkpoint, path), places_in_blocks(checkpoint, path)
    for new, old in enumerate(kept):
        block = checkpoint.read(block_tensors(checkpoint, path, range(old, old + 1)))
        tensors |= {f"{prefix}{new}.{places[name].partition('.')[2]}": one for name, one in block.items()}
    student = model_from_tensors(model_class, config, tensors, dtype, checkpoint.name)
    take_generation_config(student, checkpoint)
    # The loading names the model after its files, which are the teacher's.
    student.name_or_path = student.config.name_or_path = ""
    student.config.distillation = _origin(checkpoint.version.name, checkpoint.version.revision, kept)
    return student


def check_same_layers(student: nn.Module, teacher: nn.Module, kept: Sequence[int]) -> None:
    """Checks that each layer of a student is built like the teacher's layer that it is to continue, and the rest alike.

    Raises:
        UnsupportedError: If one is not: the config has a setting per layer that cannot be cut. Or a weight beside the
            layers has a part for each of them.
    """
    layers = find_layers(teacher)
    for new, old in enumerate(kept):
        ours, theirs = _structure(find_layers(student)[new]), _structure(layers[old])
        if (name := _first_differing(ours, theirs)) is not None:
            raise UnsupportedError(
                f"layer {old} of the teacher cannot become layer {new} of the student: its {name} would be "
                f"{ours.get(name)} instead of {theirs.get(name)}, because {type(teacher).__name__} builds layers by "
                "their position; keep layers that leave each kind in its place (whole periods, or a first part)"
            )
    ours, theirs = _shapes_beside_layers(student), _shapes_beside_layers(teacher)
    if (name := _first_differing(ours, {one: theirs.get(one) for one in ours})) is not None:
        raise UnsupportedError(
            f"{name} of a {type(teacher).__name__} has parts for single layers: it would be {ours.get(name)} instead "
            f"of {theirs.get(name)}, and which part is whose is not known; no student can be made of this type"
        )


def _first_differing(ours: Mapping[str, object], theirs: Mapping[str, object]) -> str | None:
    return min((name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)), default=None)


def _shapes_beside_layers(model: nn.Module) -> dict[str, object]:
    path = layer_list_name(model)
    return {name: tuple(one.shape) for name, one in model.named_parameters() if not name.startswith(f"{path}.")}


def _structure(layer: nn.Module) -> dict[str, object]:
    """Returns shapes of weights and plain settings of a layer's modules, by name."""
    found: dict[str, object] = {name: tuple(one.shape) for name, one in layer.named_parameters()}
    for path, module in layer.named_modules():
        found[path] = type(module).__name__
        for name, value in vars(module).items():
            is_plain = value is None or isinstance(value, bool | int | float | str)
            if is_plain and not name.startswith("_") and name not in ("layer_idx", "layer_id", "training"):
                found[f"{path}.{name}"] = value
    return found


def _on_meta(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return model_class(config)


def _student_on_meta(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, kept: Sequence[int]
) -> PreTrainedModel:
    try:
        return _on_meta(model_class, config)
    except (ValueError, IndexError, ZeroDivisionError) as exc:
        raise UnsupportedError(
            f"transformers makes no {model_class.__name__} of layers {list(kept)} alone ({one_line(exc)}): keep whole "
            "periods, or another part"
        ) from exc


def _check_in_memory(teacher: PreTrainedModel) -> None:
    for name, tensor in teacher.named_parameters():
        if tensor.is_meta or tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
            raise ConfigError(
                f"{name} of the teacher is not in this machine's memory (remote, offloaded or on meta): give "
                "make_student the teacher's directory or Hub id instead, of which it reads what is kept"
            )
        if not tensor.is_floating_point():
            raise ConfigError(
                f"{name} of the teacher is quantized ({tensor.dtype}) and cannot be trained: load the teacher in a "
                "floating type, or give make_student its directory or Hub id"
            )


def _names(student: nn.Module, path: str, kept: Sequence[int]) -> Iterator[tuple[str, str]]:
    """Yields the name of each tensor of a student, and the teacher's name of the same."""
    for name, _ in [*student.named_parameters(), *student.named_buffers()]:
        index, _, rest = name.removeprefix(f"{path}.").partition(".")
        yield name, f"{path}.{kept[int(index)]}.{rest}" if name.startswith(f"{path}.") else name


def _tensor(model: nn.Module, name: str) -> Tensor:
    owner, _, leaf = name.rpartition(".")
    found: Tensor = getattr(model.get_submodule(owner), leaf)
    return found


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    is_parameter = leaf in module._parameters
    setattr(module, leaf, nn.Parameter(tensor) if is_parameter else tensor)


def _origin(name: str, revision: str | None, kept: Sequence[int]) -> Mapping[str, Any]:
    return {"teacher": name or None, "teacher_revision": revision, "kept_layers": list(kept)}
