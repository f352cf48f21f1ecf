"""Modules of the user's between the blocks of a model, wherever the blocks run: Petals, section 2.2.

On a swarm the chain of servers ends before such a module, which runs here, and another chain begins behind it.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from swarm_plugins.backbone.served import stack_of
from swarm_plugins.block_io import as_returned
from swarm_plugins.checkpoint.partition import decoder_of, find_layers, layer_list_name
from swarm_plugins.columns import arguments_of
from swarm_plugins.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from swarm_plugins.backbone.stack import RemoteStack

Place = Literal["before", "after", "instead_of"]
INSERTED = "_swarm_inserted"
"""Attribute of a decoder: the names of the modules that were inserted between its blocks."""


def insert_module(
    model: PreTrainedModel,
    name: str,
    module: nn.Module,
    *,
    before: int | None = None,
    after: int | None = None,
    instead_of: int | None = None,
) -> None:
    """Runs a module of yours before a block, after it, or in its place: on a swarm, offloaded or in memory.

    It is called with the hidden states of the new tokens, ``[batch, length, width]``, and returns as many. It becomes
    the submodule ``name`` of the decoder, so PEFT trains and saves it by ``modules_to_save=[name]``; without PEFT it
    is in ``state_dict()`` as the head is. While a model generates, it sees each token once, and what it keeps of tokens
    seen before is its own affair. To load a saved adapter, insert a module of the same name and shape first.

    On a swarm, each place costs one more trip to the servers and back (Petals, Borzunov et al. 2023, section 2.2).

    Args:
        model: A model of transformers; insert modules before ``get_peft_model``.
        name: What PEFT and the state dict know the module by.
        module: On the model's device, and of its dtype.
        before: The block whose input it changes, counted from 0.
        after: The block whose output it changes.
        instead_of: The block that it replaces.

    Raises:
        ConfigError: If not exactly one place is given, the block does not exist, the name is taken, the module is none,
            or servers cannot run the blocks on both sides apart from each other.
        UnsupportedError: If blocks of this model hand on more than hidden states, which would be lost there.
    """
    place, block = _only_place({"before": before, "after": after, "instead_of": instead_of})
    layers = find_layers(model)
    if not 0 <= block < len(layers):
        raise ConfigError(f"{place}={block}: this model has the blocks 0 to {len(layers) - 1}")
    stack = stack_of(model)
    if stack is not None and block in stack.blocks and block not in stack.called:
        raise ConfigError(f"{place}={block}: this model calls that block with images alone; choose the one before it")
    decoder = decoder_of(model, layer_list_name(model))
    if not name.isidentifier() or hasattr(decoder, name):
        raise ConfigError(f"name={name!r}: expected a Python name that {type(decoder).__name__} has no attribute of")
    if not isinstance(module, nn.Module):
        raise ConfigError(f"module is a {type(module).__name__}: expected a torch.nn.Module")
    if stack is not None:
        stack.cut(range(block + (place == "after"), block + (place != "before")))
    inserted = _Inserted(decoder, name, stack, block)
    layer = layers[block]
    if place == "instead_of":
        inserted.num_returned = _num_returned(layer, stack)
        layer.forward = inserted.replace
    elif place == "before":
        layer.register_forward_pre_hook(inserted.change_input, with_kwargs=True)
    else:
        layer.register_forward_hook(inserted.change_output)
    decoder.add_module(name, module)
    setattr(decoder, INSERTED, (*getattr(decoder, INSERTED, ()), name))


def _only_place(places: dict[Place, int | None]) -> tuple[Place, int]:
    given = [(place, block) for place, block in places.items() if block is not None]
    if len(given) != 1:
        named = ", ".join(f"{place}={block}" for place, block in given) or "none"
        raise ConfigError(f"expected one of before=, after= and instead_of=, got {named}")
    return given[0]


def _num_returned(layer: nn.Module, stack: RemoteStack | None) -> int:
    """Returns how many values a layer returns in a tuple; 0: a tensor alone."""
    if stack is not None:
        return stack.num_returned
    if inspect.signature(layer.forward).return_annotation not in (Tensor, "torch.Tensor", "Tensor"):
        raise UnsupportedError(
            f"{type(layer).__name__} returns more than hidden states, so nothing can take its place; use before= or "
            "after= instead"
        )
    return 0


class _Inserted:
    """Calls a decoder's submodule at one place. Copied with the model, it calls the copy's."""

    def __init__(self, decoder: nn.Module, name: str, stack: RemoteStack | None, block: int) -> None:
        self._decoder = decoder
        self._name = name
        self._stack = stack
        self._block = block
        self.num_returned = 0

    def change_input(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Changes what a layer is called with."""
        if args:
            return (self._run(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._run(kwargs["hidden_states"])}

    def change_output(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Changes what a layer returns."""
        return (self._run(output[0]), *output[1:]) if isinstance(output, tuple | list) else self._run(output)

    def replace(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Takes a layer's place."""
        if self._stack is not None and self._stack.is_noting:
            noted = self._stack.run_block(self._block, hidden_states, None, arguments_of(args, kwargs))
            return as_returned(noted, self.num_returned)
        cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
        if cache is not None:
            _count_tokens(cache, self._block, hidden_states)
        return as_returned(self._run(hidden_states), self.num_returned)

    def _run(self, hidden: Tensor) -> Tensor:
        if self._stack is not None and self._stack.is_noting:
            return hidden
        output = getattr(self._decoder, self._name)(hidden)
        if not isinstance(output, Tensor) or output.shape != hidden.shape:
            found = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ConfigError(
                f"module {self._name!r} beside block {self._block} returned {found}, expected hidden states of shape "
                f"{list(hidden.shape)}, as it was given"
            )
        return output


def _count_tokens(cache: Cache, block: int, hidden: Tensor) -> None:
    """Tells a replaced block's layer of the cache of new tokens: models ask layers how many there are."""
    if block >= len(cache.layers) or isinstance(cache.layers[block], CacheLayerMixin):
        # As little as is counted: a layer with keys of no width has no tokens.
        marks = hidden.new_zeros(hidden.shape[0], 1, hidden.shape[1], 1)
        cache.update(marks, marks, block)
