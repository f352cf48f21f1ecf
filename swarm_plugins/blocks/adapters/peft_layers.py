"""Layers of PEFT's other methods, applied to a span's own modules with a client's tensors.

PEFT itself builds the layer, from checked options and around a linear layer on torch's ``meta`` device: that allocates
and initialises nothing, and gives the shapes that the client's tensors must have. One such layer serves all modules of
the same size: a call lends it the tensors and the module.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from swarm_plugins.adapter_spec import PeftLayer, PeftPart, PeftValue
from swarm_plugins.blocks.adapters.norms import weight_norm
from swarm_plugins.errors import CapacityError, ConfigError
from swarm_plugins.peft_methods import PEFT_METHODS, PeftMethod, shipped_tensors
from swarm_plugins.weights.linears import wide_weight

_NAME = "default"
_MAX_STRUCTURES = 32
"""Different layers of one adapter: a few sizes of modules, and a few ranks."""
_RANKS = ("r", "init_r")
_KEPT_STRUCTURES = 128
_TRIED_TOKENS = 2


class _Holder(nn.Module):
    """The smallest model that PEFT injects an adapter into."""

    def __init__(self, width_in: int, width_out: int, has_bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width_in, width_out, bias=has_bias)


class BorrowedLinear(nn.Linear):
    """A linear layer that another one runs for; what a method's layer sees as its base layer."""

    def __init__(self, like: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = like.in_features, like.out_features
        self.__dict__["lent"] = None

    @property
    def module(self) -> nn.Linear:
        """The layer that runs for it now."""
        module: nn.Linear = self.__dict__["lent"][0]
        return module

    @contextmanager
    def running(self, module: nn.Linear, run: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Runs ``run`` in its place, on the weights of ``module``."""
        outer = self.__dict__["lent"]
        self.__dict__["lent"] = module, run
        try:
            yield
        finally:
            self.__dict__["lent"] = outer

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            return wide_weight(self.__dict__["lent"][0])
        if name == "bias":
            return self.__dict__["lent"][0].bias
        return super().__getattr__(name)

    def forward(self, input: Tensor) -> Tensor:
        """Returns the module's result."""
        _, run = self.__dict__["lent"]
        result: Tensor = run(input)
        return result


class _Masked(nn.Module):
    """A dropout whose mask is known."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns the input with some elements zeroed and the others scaled."""
        return hidden * self.mask.reshape(hidden.shape).to(hidden.dtype)


class Structure(NamedTuple):
    """A layer of PEFT without values; used by one thread."""

    layer: Any
    base: BorrowedLinear
    dropout: str
    """The layer's attribute with its dropouts. Empty: none."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of the tensors that are shipped, by name."""

    def run(
        self,
        tensors: Mapping[str, Tensor],
        module: nn.Linear,
        base: Callable[[Tensor], Tensor],
        entry: PeftLayer,
        hidden: Tensor,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Returns the layer's result on ``[..., width]``; ``mask`` is what its dropout multiplies with."""
        values = {_with_adapter(name): tensor for name, tensor in tensors.items()}
        with self.base.running(module, base), self._scaling(entry.scaling), self._dropping(mask):
            result: Tensor = functional_call(self.layer, values, (hidden,))
        return result

    @property
    def has_scaling(self) -> bool:
        """Whether the layer multiplies its update by a number of its own."""
        return _NAME in getattr(self.layer, "scaling", ())

    @contextmanager
    def _scaling(self, scaling: float | None) -> Iterator[None]:
        if scaling is None:
            yield
            return
        # The layer inside another one of the same structure must not leave its own.
        outer, self.layer.scaling[_NAME] = self.layer.scaling[_NAME], scaling
        try:
            yield
        finally:
            self.layer.scaling[_NAME] = outer

    @contextmanager
    def _dropping(self, mask: Tensor | None) -> Iterator[None]:
        if not self.dropout or (mask is None and not self.layer.training):
            yield
            return
        dropouts = getattr(self.layer, self.dropout)
        outer, dropouts[_NAME] = dropouts[_NAME], nn.Identity() if mask is None else _Masked(mask)
        # A layer in evaluation mode knows that its dropout does nothing.
        was_training, self.layer.training = self.layer.training, mask is not None
        try:
            yield
        finally:
            dropouts[_NAME], self.layer.training = outer, was_training


class _Made(TorchDispatchMode):
    """Counts the bytes of all tensors that are made inside the ``with`` block; views have none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not any(one.alias_info for one in func._schema.returns):
            found = made if isinstance(made, (tuple, list)) else (made,)
            self.num_bytes += sum(one.nbytes for one in found if isinstance(one, Tensor))
        return made


def checking_part(
    part: PeftPart, linear_of: Callable[[PeftLayer], nn.Linear], *, max_rank: int, max_run_bytes: int
) -> Iterator[None]:
    """Checks layers against the modules they are for, and yields after each that was built; allocates nothing.

    Args:
        part: The layers.
        linear_of: Returns the module of a layer, or raises.
        max_rank: Largest value of the option ``r``.
        max_run_bytes: Most memory that a layer's call may take whatever its input: some make whole matrices.

    Raises:
        CapacityError: If a layer takes more than ``max_run_bytes``.
        ConfigError: If a layer does not fit its module, or its options or sizes are not allowed.
    """
    method = PEFT_METHODS.get(part.method)
    if method is None:
        raise ConfigError(f"unknown method {part.method[:64]!r} of an adapter; known: {', '.join(PEFT_METHODS)}")
    seen: set[tuple[int, str]] = set()
    checked: set[tuple[object, ...]] = set()
    for entry in part.layers:
        where = f"block {entry.block}, {entry.module[:256]}"
        if (entry.block, entry.module) in seen:
            raise ConfigError(f"the adapter names {where} twice")
        seen.add((entry.block, entry.module))
        _check_numbers(part, entry, where)
        linear = linear_of(entry)
        shapes = tuple(part.shapes[place] for place in entry.places)
        sizes = (shapes, linear.in_features, linear.out_features)
        key = (entry.options, entry.names, entry.scaling is None, *sizes)
        if key in checked:
            continue
        if len(checked) == _MAX_STRUCTURES:
            raise ConfigError(
                f"the adapter has more than {_MAX_STRUCTURES} different layers: use fewer different ranks"
            )
        _check_options(method, entry, where, max_rank)
        structure = structure_of(part.method, entry, linear)
        _check_scaling(structure, entry, part.method, where)
        _check_shapes(structure, entry, shapes, where)
        made = _tried(structure, entry, shapes, linear, where)
        if made > max_run_bytes:
            raise CapacityError(
                f"{where}: a call of a layer of {part.method} makes {made} bytes, the limit is {max_run_bytes} bytes: "
                "adapt this module with LoRA, or use a server with more memory"
            )
        checked.add(key)
        yield


def structure_of(method: str, entry: PeftLayer, linear: nn.Linear) -> Structure:
    """Returns the layer of PEFT for a module; equal ones are built once for each thread: a call lends them tensors.

    Raises:
        ConfigError: If PEFT refuses the options for such a module.
    """
    sizes = linear.in_features, linear.out_features, linear.bias is not None
    try:
        return _structure(threading.get_ident(), method, entry.options, *sizes)
    except (ValueError, TypeError, RuntimeError, ArithmeticError, LookupError) as error:
        raise ConfigError(
            f"{method} with {dict(entry.options)} does not fit block {entry.block}, {entry.module}: {error}"
        ) from error


@functools.lru_cache(maxsize=_KEPT_STRUCTURES)
@torch.inference_mode(mode=False)  # its tensors may go into a graph later
def _structure(
    thread: int, method: str, options: tuple[tuple[str, PeftValue], ...], width_in: int, width_out: int, has_bias: bool
) -> Structure:
    built = _build(method, dict(options), width_in, width_out, has_bias)
    shapes = {name: tuple(tensor.shape) for name, tensor in shipped_tensors(built, _NAME, method).items()}
    base = BorrowedLinear(built.base_layer)
    built.base_layer = base
    for dora in getattr(built, "lora_magnitude_vector", nn.ModuleDict()).values():
        dora.forward = functools.partial(_dora_result, dora)
    for rotation in getattr(built, "oft_R", nn.ModuleDict()).values():
        rotation._pytorch_skew_symmetric = _skew_symmetric
    return Structure(built.eval(), base, PEFT_METHODS[method].dropout, shapes)


def _build(method: str, options: Mapping[str, PeftValue], width_in: int, width_out: int, has_bias: bool) -> Any:
    # Some hundred milliseconds, of a server that may never need it.
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING, PeftType

    kind = PeftType(method)
    config_class: Any = PEFT_TYPE_TO_CONFIG_MAPPING[kind]
    known = PEFT_METHODS[method]
    config = config_class(target_modules=["linear"], **{**known.fixed, **known.given, **options})
    with torch.device("meta"):
        holder = _Holder(width_in, width_out, has_bias)
        tuner_class: Any = PEFT_TYPE_TO_TUNER_MAPPING[kind]
        tuner_class(holder, {_NAME: config}, _NAME)
    return holder.linear


def _skew_symmetric(vector: Tensor, size: int) -> Tensor:
    """Returns ``[batch, size, size]`` with ``[batch, size * (size - 1) / 2]`` above the diagonal, as OFT's layer does.

    PEFT keeps the places in buffers, which have no values here.
    """
    rows, columns = torch.triu_indices(size, size, 1, device=vector.device)
    matrix = vector.new_zeros(len(vector), size, size)
    matrix[:, rows, columns] = vector
    return matrix - matrix.transpose(-2, -1)


def _dora_result(
    dora: Any,
    hidden: Tensor,
    *,
    lora_A: nn.Linear,
    lora_B: nn.Linear,
    scaling: float,
    base_layer: BorrowedLinear,
    base_result: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Returns what DoRA adds to the base's result, as PEFT's own layer does (Liu et al. 2024, section 4).

    PEFT multiplies LoRA's factors with an identity of the module's width and computes the norm in each forward.
    """
    norm = weight_norm(base_layer.module, lora_A.weight, lora_B.weight, scaling)
    factor = (dora.weight / norm).view(1, -1)
    product = lora_B(lora_A(hidden))
    if base_result is None:
        base_result = nn.functional.linear(hidden, base_layer.weight.to(hidden.dtype))
    elif base_layer.bias is not None:
        base_result = base_result - base_layer.bias
    result: Tensor = (factor - 1) * base_result + factor * product * scaling
    return result


def _with_adapter(name: str) -> str:
    first, *rest = name.split(".")
    return ".".join([first, _NAME, *rest])


def _check_numbers(part: PeftPart, entry: PeftLayer, where: str) -> None:
    if len(entry.names) != len(entry.places) or not all(0 <= place < len(part.shapes) for place in entry.places):
        raise ConfigError(
            f"{where} names {len(entry.names)} tensors at {list(entry.places)[:8]}; the adapter has {len(part.shapes)}"
        )
    if entry.scaling is not None and not math.isfinite(entry.scaling):
        raise ConfigError(f"the scaling of {where} is {entry.scaling}; expected a finite number")
    if not 0.0 <= entry.dropout < 1.0:
        raise ConfigError(f"the dropout of {where} is {entry.dropout}; expected 0 <= dropout < 1")


def _check_options(method: PeftMethod, entry: PeftLayer, where: str, max_rank: int) -> None:
    given = dict(entry.options)
    if len(given) != len(entry.options) or given.keys() != method.options.keys():
        raise ConfigError(
            f"{where} has the options {sorted(given)}; expected {', '.join(sorted(method.options))}, each once"
        )
    for name, value in given.items():
        option = method.options[name]
        if option.allowed:
            if not any(value == one and type(value) is type(one) for one in option.allowed):
                raise ConfigError(f"{name} of {where} is {value!r}; allowed are {', '.join(map(repr, option.allowed))}")
            continue
        most = min(option.most, max_rank) if name in _RANKS else option.most
        if isinstance(value, (str, bool)) or not option.least <= value <= most:
            allowed = f"expected a number from {option.least} to {most}"
            raise ConfigError(f"{name} of {where} is {str(value)[:64]}; {allowed}")


def _check_scaling(structure: Structure, entry: PeftLayer, method: str, where: str) -> None:
    # Clients share one structure: without a scaling of its own, a layer would use the previous client's.
    if structure.has_scaling and entry.scaling is None:
        raise ConfigError(f"{where} has no scaling; {method} needs a number: send the layer's")
    if not structure.has_scaling and entry.scaling is not None:
        raise ConfigError(f"{where} has the scaling {entry.scaling}; {method} has none: send no scaling")


def _check_shapes(structure: Structure, entry: PeftLayer, shapes: Sequence[tuple[int, ...]], where: str) -> None:
    if sorted(entry.names) != sorted(structure.shapes):
        raise ConfigError(
            f"{where} has the tensors {', '.join(entry.names)[:256]}; expected {', '.join(structure.shapes)}"
        )
    for name, shape in zip(entry.names, shapes, strict=True):
        expected = structure.shapes[name]
        # Layers of different sizes may share a tensor that is as large as the largest of them needs.
        if len(shape) != len(expected) or any(have < need for have, need in zip(shape, expected, strict=True)):
            raise ConfigError(f"{name} of {where} has shape {list(shape)}; expected {list(expected)}")


def _tried(
    structure: Structure, entry: PeftLayer, shapes: Sequence[tuple[int, ...]], linear: nn.Linear, where: str
) -> int:
    """Runs a layer on ``meta`` for a few tokens; returns how many bytes it would make."""
    given = {name: torch.empty(shape, device="meta") for name, shape in zip(entry.names, shapes, strict=True)}
    hidden = torch.empty(1, _TRIED_TOKENS, linear.in_features, device="meta")
    plain = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
    made = _Made()
    try:
        with torch.no_grad(), made:
            result = structure.run(given, plain, functools.partial(nn.Linear.forward, plain), entry, hidden)
    except (ValueError, TypeError, RuntimeError, IndexError) as error:
        raise ConfigError(f"the tensors of {where} do not fit each other: {error}") from error
    if result.shape != (1, _TRIED_TOKENS, linear.out_features):
        raise ConfigError(f"the tensors of {where} give {list(result.shape)} for {_TRIED_TOKENS} tokens")
    return made.num_bytes
