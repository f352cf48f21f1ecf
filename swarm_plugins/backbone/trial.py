"""Tries a family that nobody has tried: a small random model of its config, cut in two, against the whole one.

Client and servers do what they always do, in this process; only the network between them is left out.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedConfig, PreTrainedModel

from swarm_plugins.backbone.loading import load_remote
from swarm_plugins.backbone.stack import RemoteStack
from swarm_plugins.block_io import CacheOp, SpanInputs, SpanOutputs
from swarm_plugins.borders import nearest_border, tied_blocks
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.checkpoint.loading import CONSTRUCTION
from swarm_plugins.checkpoint.outline import meta_model
from swarm_plugins.checkpoint.partition import num_blocks_of
from swarm_plugins.checkpoint.tiny import FIRST_SPECIAL, VOCAB_SIZE, randomize, tiny_config
from swarm_plugins.checkpoint.tried import is_tried
from swarm_plugins.errors import CapacityError, SwarmError, UnsupportedError, one_line
from swarm_plugins.noise import quiet_transformers

if TYPE_CHECKING:
    from swarm_plugins.blocks import KVCache, Span
    from swarm_plugins.client.connection import RemoteBlocks
    from swarm_plugins.versions import ModelVersion

log = logging.getLogger(__name__)

MAX_PARAMETERS = 1 << 24
"""Of the small model: 64 MiB, which exist three times."""
_NUM_NEW = 4
_TOLERANCE = 1e-4
"""Of the largest value: sums may have another order. What is left out or counted twice changes percents."""


class _DiffersError(Exception):
    """The cut model is not the whole one."""


def try_family(config: PreTrainedConfig, name: str) -> None:
    """Checks that a model's family gives the same logits and gradients when its blocks are cut apart.

    Does nothing for a type that the tests of this release have compared; another one takes seconds, once a process.

    Args:
        config: Of the model, which has any size.
        name: Of the model, for the message.

    Raises:
        UnsupportedError: If they differ, or no small model can be made of the config.
    """
    if is_tried(config):
        return
    log.info("model_type %r is new here: trying a small random model of its config first", config.model_type)
    fault = _fault_of(_Described(type(config), json.dumps(config.to_dict(), default=str, sort_keys=True), config))
    if fault is not None:
        raise UnsupportedError(
            f"{name}: model_type {config.model_type!r} was never tried with transformers {transformers.__version__}, "
            f"and a small random model of its config, cut in two, is not the whole one ({fault}): use a model_type of "
            "the page of model families, or load the model with transformers alone"
        )


class _Described:
    """A config that is equal to others with the same text."""

    def __init__(self, kind: type[PreTrainedConfig], text: str, config: PreTrainedConfig) -> None:
        self._key = (kind, text)
        self.config = config

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Described) and self._key == other._key


@functools.lru_cache(maxsize=16)
def _fault_of(described: _Described) -> str | None:
    """Returns how a family's cut model differs from the whole one, in one line; None: it does not."""
    try:
        with (
            quiet_transformers(),
            torch.random.fork_rng(devices=[]),
            _as_at_start(),
            _small_models(described.config) as models,
        ):
            _compare(*models)
    except _DiffersError as error:
        return str(error)
    except Exception as error:
        # An unknown model may raise anything anywhere, but a full disk or memory is not the family's fault.
        if isinstance(error, OSError | MemoryError) and not isinstance(error, SwarmError):
            raise
        return one_line(error, with_kind=True)
    return None


@contextlib.contextmanager
def _as_at_start() -> Iterator[None]:
    """Takes back what a model may be loaded in: other devices and types, and no gradients."""
    with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
        yield


@contextlib.contextmanager
def _small_models(config: PreTrainedConfig) -> Iterator[tuple[PreTrainedModel, PreTrainedModel]]:
    """Yields a small random model of a config, whole, and with its blocks in two spans."""
    # Late: a client whose family is known does not load what runs blocks.
    from swarm_plugins.blocks import load_span

    outline = meta_model(tiny_config(config), torch.float32)
    number = sum(weight.numel() for weight in outline.parameters())
    if number > MAX_PARAMETERS:
        raise CapacityError(f"its smallest model has {number} parameters, at most {MAX_PARAMETERS} are tried")
    with tempfile.TemporaryDirectory() as folder:
        with CONSTRUCTION:
            torch.manual_seed(0)
            made: Any = type(outline)._from_config(outline.config, dtype=torch.float32)
        randomize(made, torch.Generator().manual_seed(0))
        made.save_pretrained(folder)
        checkpoint = Checkpoint.open(folder)
        tied, end = tied_blocks(checkpoint.config), num_blocks_of(checkpoint.config)
        cut = nearest_border(end // 2, tied)
        spans = [load_span(checkpoint, blocks) for blocks in (range(cut), range(cut, end)) if blocks]
        stack = RemoteStack(version=checkpoint.version, num_blocks=end, tied=tied)
        stack._remote = cast("RemoteBlocks", _Spans(spans, checkpoint.version))
        yield (
            # As stored: the cut is not to blame for what a file loses.
            type(made).from_pretrained(folder, dtype=torch.float32).eval(),
            load_remote(
                type(outline),
                checkpoint,
                stack,
                name=folder,
                dtype=torch.float32,
                device="cpu",
                config_changes={},
            ),
        )


class _Spans:
    """What a client sees of a swarm, in the place of `RemoteBlocks`: spans of this process, one after another."""

    def __init__(self, spans: Sequence[Span], version: ModelVersion) -> None:
        self.spans = spans
        self.version = version

    @property
    def view(self) -> _Spans:
        """What knows the version."""
        return self

    def forward(self, inputs: SpanInputs) -> SpanOutputs:
        """Runs all blocks without a session."""
        outputs = SpanOutputs(hidden=inputs.hidden)
        for span in self.spans:
            outputs = span.forward(inputs.take_blocks(span.blocks, outputs.hidden))
        return outputs

    def open_session(self, blocks: range, prefix: Sequence[Tensor] = ()) -> list[KVCache]:
        """Returns the caches of a session, which its first step makes."""
        return []

    def release(self, session: list[KVCache]) -> None:
        """Ends a session."""
        for cache in session:
            cache.close()

    def step(self, session: list[KVCache], inputs: SpanInputs, ops: Sequence[CacheOp] = ()) -> SpanOutputs:
        """Runs all blocks on new tokens of a session."""
        from swarm_plugins.blocks import StepInputs

        session[:] = session or [span.new_cache(inputs.hidden.shape[0], span.blocks) for span in self.spans]
        outputs = SpanOutputs(hidden=inputs.hidden)
        for span, cache in zip(self.spans, session, strict=True):
            step = StepInputs(
                cache=cache,
                blocks=span.blocks,
                hidden=outputs.hidden,
                position_ids=inputs.position_ids,
                attention_mask=inputs.attention_mask,
                layer_masks=inputs.layer_masks,
                token_ids=inputs.token_ids,
            )
            outputs = span.step([step])[0]
        return outputs


def _compare(whole: PreTrainedModel, cut: PreTrainedModel) -> None:
    """Raises _DiffersError if logits of prompts and of the steps after them, or gradients, differ."""
    # Longer than windows are, [2, 12]; the first row is padded to the left.
    ids = torch.randint(3, FIRST_SPECIAL, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[0, :4] = mask[0, :4] = 0
    for what, rows in (("a prompt", slice(1, 2)), ("a padded batch", slice(0, 2))):
        inputs = {"input_ids": ids[rows], "attention_mask": mask[rows]}
        _check_equal(f"logits of {what} and of the steps after it", _said(whole, inputs), _said(cut, inputs))
    expected, found = (_gradients(model, ids[1:]) for model in (whole, cut))
    own = {name for name, weight in cut.named_parameters() if weight.requires_grad} & expected.keys()
    if found.keys() != own or not own:
        raise _DiffersError(f"{', '.join(sorted(found.keys() ^ own)) or 'no tensor'} gets a gradient in one of them")
    scale = max(float(expected[name].abs().max()) for name in own)
    for name in sorted(own):
        _check_equal(f"gradient of {name}", expected[name], found[name], scale)


def _said(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> Tensor:
    """Returns the logits of a prompt's last token and of greedy steps after it, ``[steps, B, vocabulary]``."""
    run: Any = model
    answer = run.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=_NUM_NEW,
        min_new_tokens=_NUM_NEW,
        pad_token_id=0,
        # Tokens of images would need images.
        suppress_tokens=[0, 1, 2, *range(FIRST_SPECIAL, VOCAB_SIZE)],
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.stack(answer.logits)


def _gradients(model: PreTrainedModel, ids: Tensor) -> dict[str, Tensor]:
    """Returns the gradients of a loss on one row, by parameter."""
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    with torch.enable_grad():
        cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def _check_equal(what: str, whole: Tensor, cut: Tensor, scale: float | None = None) -> None:
    scale = float(whole.abs().max()) if scale is None else scale
    difference = float((whole - cut).abs().max())
    # Not by the opposite: NaN is a difference, too.
    if not difference <= _TOLERANCE * scale:
        raise _DiffersError(f"{what}: they differ by {difference:.1e}, the largest is {scale:.1e}")
