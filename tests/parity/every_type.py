"""Compares a tiny model of every causal-LM type over a swarm with the local one.

As a script it prints a line per type: ``python tests/parity/every_type.py [types...]``.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar
from type_models import SPANS, TYPES, VARIANTS, save_type

from swarm_plugins import AutoSwarmModelForCausalLM, OffloadConfig, SwarmConfig
from swarm_plugins.errors import CheckpointError, ConfigError, UnsupportedError
from swarm_plugins.testing.in_process import InProcessSwarm

REFUSALS = (UnsupportedError, ConfigError, CheckpointError)
NUM_NEW = 8
# Another order of sums: experts of servers compute in another form.
TOLERANCE = 1e-5


class DiffersError(AssertionError):
    """The remote model is not the local one; says where and by how much."""


@contextmanager
def swarmed(
    directory: Path,
    spans: Sequence[tuple[int, int]] | None = None,
    offload: OffloadConfig | None = None,
    config: SwarmConfig | None = None,
) -> Iterator[tuple[PreTrainedModel, InProcessSwarm]]:
    """Yields a directory's model over two servers in this process, which may leave experts on disk.

    Raises:
        SwarmError: If a server or the client refuses it.
    """
    # Servers that did start are closed if another one refuses.
    with closing(InProcessSwarm(directory, spans=spans, offload=offload, config=config)) as swarm:
        swarm.start()
        yield AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection), swarm


def compare(model_type: str, directory: Path, offload: OffloadConfig | None = None) -> None:
    """Compares tokens, logits and gradients of a type's tiny model, which the directory has.

    Raises:
        DiffersError: If any of them differs.
        SwarmError: If the type is refused.
    """
    with swarmed(directory, SPANS.get(model_type), offload) as (remote, _):
        compare_with_local(remote, directory)


def compare_with_local(remote: PreTrainedModel, directory: Path) -> None:
    """Compares a remote model with the local one of its directory.

    Raises:
        DiffersError: If tokens, logits or gradients differ.
    """
    compare_models(remote, AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval())


def compare_models(remote: PreTrainedModel, local: PreTrainedModel) -> None:
    """Compares a remote model with a local one.

    Raises:
        DiffersError: If tokens, logits or gradients differ.
    """
    for what, say in (("a prompt", _prompt), ("a padded batch", _padded)):
        _check_said(what, said(remote, say()), said(local, say(), **trusted(local)))
    check_equal("logits of a padded batch", padded_logits(remote), padded_logits(local))
    _check_gradients(gradients(remote), gradients(local), owned=_owned(remote))


def trusted(local: PreTrainedModel) -> dict[str, Any]:
    """Returns options of ``generate()`` with which a local model is right.

    With a cache of their own kind some families mix up rows (RWKV), and none reorders it.
    """
    return {} if local._supports_default_dynamic_cache() else {"use_cache": False}


def _prompt() -> dict[str, Tensor]:
    """Returns a prompt ``[1, 12]`` and its mask."""
    ids = _tokens(12)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _padded() -> dict[str, Tensor]:
    """Returns prompts of lengths 5 and 9, padded on the left, ``[2, 9]``, and their mask."""
    ids = torch.zeros(2, 9, dtype=torch.long)
    ids[0, 4:], ids[1] = _tokens(5)[0], _tokens(9, seed=2)[0]
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def said(model: PreTrainedModel, inputs: dict[str, Tensor], **options: Any) -> tuple[list[list[int]], Tensor]:
    """Returns the greedy continuation of prompts, and the logits ``[steps, batch, vocabulary]`` it was taken from."""
    answer = model.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=NUM_NEW,
        min_new_tokens=NUM_NEW,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    return answer.sequences[:, inputs["input_ids"].shape[1] :].tolist(), torch.stack(answer.logits)


@torch.no_grad()
def padded_logits(model: PreTrainedModel) -> Tensor:
    """Returns logits ``[14, vocabulary]`` at the tokens of the padded batch."""
    inputs = _padded()
    return model(**inputs).logits[inputs["attention_mask"].bool()]


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    """Returns the gradients of a training loss by parameter."""
    ids = torch.cat([_tokens(9), _tokens(9, seed=2)])
    # Not by `labels`: git's loss leaves out the positions of images.
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def _owned(remote: PreTrainedModel) -> set[str]:
    """Returns the names of the client's tensors: those of remote blocks are frozen."""
    return {name for name, weight in remote.named_parameters() if weight.requires_grad}


def _tokens(num: int, *, seed: int = 1) -> Tensor:
    """Returns random tokens ``[1, num]`` that are not special ones."""
    return torch.randint(3, 100, (1, num), generator=torch.Generator().manual_seed(seed))


def _check_said(what: str, remote: tuple[list[list[int]], Tensor], local: tuple[list[list[int]], Tensor]) -> None:
    if remote[0] != local[0]:
        raise DiffersError(f"greedy tokens of {what}: {remote[0]}, local {local[0]}")
    check_equal(f"logits of the steps after {what}", remote[1], local[1])


def _check_gradients(remote: dict[str, Tensor], local: dict[str, Tensor], owned: set[str]) -> None:
    expected = {name: gradient for name, gradient in local.items() if name in owned}
    if remote.keys() != expected.keys() or not expected:
        raise DiffersError(f"tensors with gradients: {sorted(remote)}, local {sorted(expected)}")
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in remote.items():
        check_equal(f"gradient of {name}", gradient, local[name], scale)


def check_equal(what: str, remote: Tensor, local: Tensor, scale: float | None = None) -> None:
    if not bool(local.isfinite().all()):
        raise DiffersError(f"{what}: the local model's are not finite")
    difference = float((remote - local).abs().max())
    scale = float(local.abs().max()) if scale is None else scale
    if not difference <= TOLERANCE * scale:
        raise DiffersError(f"{what}: differ by {difference:.1e}, largest {scale:.1e}")


def outcome(model_type: str) -> str:
    """Returns what became of a type, in one line."""
    try:
        with tempfile.TemporaryDirectory() as name:
            try:
                directory = save_type(model_type, Path(name))
            except Exception as error:  # noqa: BLE001
                return f"not built: {_crash(error)}"
            compare(model_type, directory)
    except DiffersError as error:
        return f"differs: {error}"
    except REFUSALS as error:
        return f"refused: {type(error).__name__}: {' '.join(str(error).split())}"
    except Exception as error:  # noqa: BLE001 - the others are to be run too
        return f"crash: {_crash(error)}"
    return "equal"


def _crash(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{'/'.join(Path(last.filename).parts[-2:])}:{last.lineno}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({where})"


def quiet() -> None:
    """Prints no warnings."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    disable_progress_bar()


def main(types: list[str]) -> None:
    """Prints a line per type."""
    quiet()
    for model_type in types or (*TYPES, *VARIANTS):
        start = time.monotonic()
        print(f"{model_type:24} {outcome(model_type)}, {time.monotonic() - start:.1f} s", flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
