"""A teacher and a student: loading the one, and whether they fit together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from swarm_plugins.errors import ConfigError, one_line
from swarm_plugins.model_names import expanded


def load_teacher(name_or_dir: str | Path, student: nn.Module) -> nn.Module:
    """Loads a teacher onto the student's device.

    Raises:
        ConfigError: If there is no such model.
    """
    teacher: Any = load_language_model("teacher", name_or_dir)
    found: nn.Module = teacher.to(_device_of(student))
    return found


def load_language_model(role: str, name_or_dir: str | Path, **options: Any) -> PreTrainedModel:
    """Loads a causal language model; messages name its role.

    Raises:
        ConfigError: If there is no such model.
    """
    try:
        found: PreTrainedModel = AutoModelForCausalLM.from_pretrained(str(expanded(name_or_dir)), **options)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{role} {str(name_or_dir)!r} cannot be loaded ({one_line(error)}); give the directory of a causal "
            "language model, or its id on the Hub"
        ) from error
    return found


def check_pair(student: nn.Module, teacher: nn.Module) -> None:
    """Checks that a teacher fits a student.

    Raises:
        ConfigError: If they are one model or share weights, or differ in vocabulary or device.
    """
    own = {id(parameter): name for name, parameter in student.named_parameters()}
    shared = [own[id(parameter)] for parameter in teacher.parameters() if id(parameter) in own]
    if teacher is student or shared:
        what = "is the student" if teacher is student else f"shares {len(shared)} weights with it, such as {shared[0]}"
        raise ConfigError(
            f"the teacher {what}: it would change while it teaches; make the student with make_student(teacher, ...), "
            "which copies, or load the teacher once more"
        )
    sizes = [getattr(getattr(one, "config", None), "vocab_size", None) for one in (student, teacher)]
    if None not in sizes and sizes[0] != sizes[1]:
        raise ConfigError(
            f"the teacher's vocabulary has {sizes[1]} tokens, the student's {sizes[0]}: distillation compares token by "
            "token; choose a teacher with the student's tokenizer, or make the student with make_student(teacher, ...)"
        )
    devices = _device_of(student), _device_of(teacher)
    if devices[0] != devices[1]:
        raise ConfigError(
            f"the teacher is on {devices[1]}, the student on {devices[0]}: move it with teacher.to('{devices[0]}'), or "
            "give its directory or Hub id, to have it loaded there"
        )


def check_tokenizers(tokenizer: Any, name_or_dir: str) -> None:
    """Checks that a teacher's tokenizer, if its files are on this machine, has the same tokens as another one.

    Raises:
        ConfigError: If it has others.
    """
    if not name_or_dir or not hasattr(tokenizer, "get_vocab"):
        return
    try:
        teachers: Any = AutoTokenizer.from_pretrained(name_or_dir, local_files_only=True)
    except (OSError, ValueError):
        # A checkpoint may come without one.
        return
    ours, theirs = tokenizer.get_vocab(), teachers.get_vocab()
    differing = sorted(token for token, index in ours.items() if theirs.get(token) != index)
    if differing:
        token = differing[0]
        raise ConfigError(
            f"the tokenizer of the teacher {name_or_dir} differs from the student's in {len(differing)} of {len(ours)} "
            f"tokens: {token!r} is {theirs.get(token)} there and {ours[token]} here, so distributions cannot be "
            "compared; tokenize with the teacher's tokenizer, or choose another teacher"
        )


def _device_of(model: nn.Module) -> torch.device:
    """Returns where a model takes its tokens."""
    embeddings = model.get_input_embeddings() if isinstance(model, PreTrainedModel) else model
    return next((one.device for one in embeddings.parameters()), torch.device("cpu"))


def name_of(teacher: Any) -> str:
    """Returns the directory or Hub id of a teacher; empty if unknown."""
    if isinstance(teacher, str | Path):
        return str(expanded(teacher))
    config = getattr(teacher, "config", None)
    return str(getattr(config, "name_or_path", None) or getattr(config, "_name_or_path", None) or "")


def public_name(name: str) -> str:
    """Returns the name for a config that may be published: of a directory, its last part."""
    path = Path(name)
    return path.resolve().name if name and path.is_dir() else name
