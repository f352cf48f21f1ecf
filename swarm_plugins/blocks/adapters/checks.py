"""Checks the structure of shipped adapters against the span they are for, before anything is allocated for them.

A server applies what strangers ship: only known kinds, on modules that exist, in shapes that fit, of bounded rank and
size. That values are finite is checked where they come in: at the rpc, or when a file is read.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from swarm_plugins.adapter_spec import AdapterModule, AdapterSpec, PeftLayer, adapter_digest
from swarm_plugins.block_io import LoadedAdapter
from swarm_plugins.blocks.adapters.peft_layers import checking_part
from swarm_plugins.errors import ConfigError
from swarm_plugins.moe import EXPERT_PARAMETERS, is_fused_experts
from swarm_plugins.weights.experts import PackedExperts
from swarm_plugins.weights.linears import PackedLinear

if TYPE_CHECKING:
    from swarm_plugins.blocks.span import Span

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MAX_RANK = 1024
"""Of a low-rank product."""
_MAX_BYTES = 1 << 30
"""Of all tensors together."""
_MAX_MODULES = 1 << 16


def check_adapter(
    spec: AdapterSpec,
    tensors: Sequence[Tensor],
    span: Span,
    *,
    max_run_bytes: int = 1 << 62,
    digest: str | None = None,
) -> LoadedAdapter:
    """Checks an adapter and moves it to the span's device, in one piece; see `checking_adapter`."""
    parts = checking_adapter(spec, tensors, span, max_run_bytes=max_run_bytes, digest=digest)
    while True:
        try:
            next(parts)
        except StopIteration as end:
            adapter: LoadedAdapter = end.value
            return adapter


def checking_adapter(
    spec: AdapterSpec,
    tensors: Sequence[Tensor],
    span: Span,
    *,
    max_run_bytes: int = 1 << 62,
    digest: str | None = None,
) -> Generator[None, None, LoadedAdapter]:
    """Checks an adapter and moves it to the span's device; yields after what takes long.

    Args:
        spec: Its structure.
        tensors: Its tensors.
        span: The span that it is for.
        max_run_bytes: Most memory that a layer's call may take whatever its input: some make matrices as large as their
            module.
        digest: Of the adapter, if it is known.

    Raises:
        CapacityError: If a layer needs more memory than its call may take.
        ConfigError: If the adapter does not fit the span or exceeds another limit.
    """
    _check_size(spec, tensors)
    seen: set[tuple[int, str, str, str | None]] = set()
    for entry in spec.modules:
        key = (entry.block, entry.module, entry.kind, entry.parameter)
        if key in seen:
            raise ConfigError(f"the adapter names {_where(entry)} twice")
        seen.add(key)
        _check_entry(entry, span)
    if spec.peft is not None:
        yield from checking_part(
            spec.peft,
            lambda layer: _linear(layer, _module(layer, span)),
            max_rank=_MAX_RANK,
            max_run_bytes=max_run_bytes,
        )
    return LoadedAdapter(
        digest=adapter_digest(spec, tensors) if digest is None else digest,
        spec=spec,
        tensors=tuple(tensor.to(span.spec.device) for tensor in tensors),
    )


def _check_size(spec: AdapterSpec, tensors: Sequence[Tensor]) -> None:
    if len(spec.layers) > _MAX_MODULES:
        raise ConfigError(f"the adapter has {len(spec.layers)} modules; the limit is {_MAX_MODULES}")
    shapes = spec.tensor_shapes()
    if len(shapes) != len(tensors):
        raise ConfigError(f"the adapter names {len(shapes)} tensors, {len(tensors)} came with it")
    names = [_where(entry) for entry in spec.modules for _ in entry.shapes]
    names += [] if spec.peft is None else [f"layers of {spec.peft.method[:64]}" for _ in spec.peft.shapes]
    for name, shape, tensor in zip(names, shapes, tensors, strict=True):
        if tuple(shape) != tuple(tensor.shape):
            raise ConfigError(
                f"the adapter tensor of {name} has shape {list(tensor.shape)}, announced as {list(shape)}"
            )
        if tensor.dtype not in _DTYPES:
            known = ", ".join(str(dtype) for dtype in _DTYPES)
            raise ConfigError(f"the adapter tensor of {name} is {tensor.dtype}; expected one of {known}")
    shipped = iter(tensors)
    for entry in spec.modules:
        # A product of two types fails, in the middle of a forward that others share.
        if len(dtypes := {next(shipped).dtype for _ in entry.shapes}) > 1:
            types = " and ".join(sorted(map(str, dtypes)))
            raise ConfigError(f"the adapter tensors of {_where(entry)} are {types}; expected one type for all of them")
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    if num_bytes > _MAX_BYTES:
        raise ConfigError(f"the adapter has {num_bytes} bytes; the limit is {_MAX_BYTES}")


def _check_entry(entry: AdapterModule, span: Span) -> None:
    module = _module(entry, span)
    if entry.parameter is not None and entry.kind != "lora_parameter":
        raise ConfigError(f"{_where(entry)} names a parameter, which only the kind lora_parameter has")
    if not math.isfinite(entry.scaling):
        raise ConfigError(f"the scaling of {_where(entry)} is {entry.scaling}; expected a finite number")
    if not 0.0 <= entry.dropout < 1.0:
        raise ConfigError(f"the dropout of {_where(entry)} is {entry.dropout}; expected 0 <= dropout < 1")
    if entry.kind == "ia3":
        _check_ia3(entry, _linear(entry, module))
    elif entry.kind == "lora":
        linear = _linear(entry, module)
        _check_factors(entry, linear.in_features, linear.out_features, 1)
    else:
        _check_parameter(entry, module)


def _module(entry: AdapterModule | PeftLayer, span: Span) -> nn.Module:
    if entry.block not in span.blocks:
        raise ConfigError(
            f"the adapter names {_where(entry)}; this span has blocks {span.blocks.start} to {span.blocks.stop}"
        )
    try:
        module = span.module(entry.block, entry.module)
    except AttributeError:
        raise ConfigError(f"the adapter names {_where(entry)}: the block has no such module") from None
    if (entry.block, entry.module) in span.never_called:
        raise ConfigError(
            f"the adapter names {_where(entry)}, whose weight is read by another module: an adapter there does "
            "nothing; leave it out of target_modules"
        )
    return module


def _check_ia3(entry: AdapterModule, linear: nn.Linear) -> None:
    features = linear.in_features if entry.is_feedforward else linear.out_features
    if len(entry.shapes) != 1 or math.prod(entry.shapes[0]) != features or len(entry.shapes[0]) > 2:
        raise ConfigError(
            f"the IA3 vector of {_where(entry)} has shapes {_listed(entry)}; expected one of {features} elements"
        )


def _check_parameter(entry: AdapterModule, module: nn.Module) -> None:
    shape = _shape_of(module, entry.parameter or "")
    if shape is None:
        raise ConfigError(f"the adapter names the parameter {entry.parameter!r} of {_where(entry)}: there is none")
    if refusal := getattr(module, "adapter_refusal", None):
        raise ConfigError(f"the adapter names {_where(entry)}: {refusal}")
    if entry.dropout:
        raise ConfigError(f"{_where(entry)} has dropout {entry.dropout}: LoRA on a bare parameter supports none")
    is_experts = is_fused_experts(module)
    # Experts' biases are two-dimensional: a product of one expert must not run among those of all.
    if (is_experts and entry.parameter not in EXPERT_PARAMETERS) or (len(shape) == 3 and not is_experts):
        raise ConfigError(
            f"{_where(entry)} is a {type(module).__name__}: LoRA on its {entry.parameter!r} is not supported; "
            f"supported are {', '.join(EXPERT_PARAMETERS)} of fused experts"
        )
    if is_experts and len(shape) == 3:
        experts, rows, columns = shape
        is_transposed = bool(module.is_transposed)
        if entry.num_experts != experts or entry.transposed != is_transposed:
            raise ConfigError(
                f"{_where(entry)} has {experts} experts, transposed {is_transposed}; the adapter says "
                f"{entry.num_experts}, transposed {entry.transposed}"
            )
        width_in, width_out = (rows, columns) if is_transposed else (columns, rows)
    elif len(shape) == 2 and entry.num_experts == 1:
        width_out, width_in = shape
    else:
        raise ConfigError(
            f"{_where(entry)} has shape {list(shape)}: LoRA for {entry.num_experts} experts does not fit it"
        )
    _check_factors(entry, width_in, width_out, entry.num_experts)


def _check_factors(entry: AdapterModule, width_in: int, width_out: int, experts: int) -> None:
    is_pair = len(entry.shapes) == 2 and all(len(shape) == 2 for shape in entry.shapes)
    rank = entry.shapes[0][0] // experts if is_pair else 0
    if not is_pair or rank < 1 or entry.shapes != ((rank * experts, width_in), (width_out, rank * experts)):
        times = f"{experts} x rank" if experts > 1 else "rank"
        raise ConfigError(
            f"the LoRA factors of {_where(entry)} have shapes {_listed(entry)}; expected [{times}, {width_in}] and "
            f"[{width_out}, {times}]"
        )
    if rank > _MAX_RANK:
        raise ConfigError(f"the rank of {_where(entry)} is {rank}; the limit is {_MAX_RANK}")


def _linear(entry: AdapterModule | PeftLayer, module: nn.Module) -> nn.Linear:
    if not isinstance(module, nn.Linear):
        kind = entry.kind if isinstance(entry, AdapterModule) else "its adapter"
        raise ConfigError(f"{_where(entry)} is a {type(module).__name__}; {kind} needs a linear layer")
    if not _returns_a_product(module):
        raise ConfigError(
            f"{_where(entry)} is a {type(module).__name__}, which computes more than a linear layer: an adapter cannot "
            "be added to its result; leave it out of target_modules"
        )
    return module


def _returns_a_product(module: nn.Linear) -> bool:
    """Returns whether a layer turns ``[T, in]`` into ``[T, out]``; routers and grouped layers of families do not."""
    forward = type(module).forward
    if forward is nn.Linear.forward or isinstance(module, PackedLinear):
        return True
    row = torch.zeros(1, module.in_features, dtype=module.weight.dtype, device=module.weight.device)
    try:
        with torch.inference_mode():
            found = forward(module, row)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return False
    return isinstance(found, Tensor) and found.shape == (1, module.out_features)


def _shape_of(module: nn.Module, name: str) -> tuple[int, ...] | None:
    """Returns the shape of a module's parameter as HF stores it, None if the module lacks it."""
    if isinstance(module, nn.Linear) and name == "weight":
        # A quantized weight is stored in another shape.
        return module.out_features, module.in_features
    parameter = getattr(module, name, None) if name.isidentifier() else None
    # Quantized experts are not tensors, but know the shape of the parameter they replace.
    return tuple(parameter.shape) if isinstance(parameter, (Tensor, PackedExperts)) else None


def _where(entry: AdapterModule | PeftLayer) -> str:
    return f"block {entry.block}, {entry.module}"


def _listed(entry: AdapterModule) -> str:
    return ", ".join(str(list(shape)) for shape in entry.shapes) or "none"
