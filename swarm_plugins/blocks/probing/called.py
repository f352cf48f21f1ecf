"""Which modules of blocks are read, but not called: an adapter there does nothing, locally as well."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from swarm_plugins.blocks.cut_model import CutModel
from swarm_plugins.blocks.layout import BlockKV
from swarm_plugins.blocks.probing.runs import Session, run


def never_called(cut: CutModel, hidden: Tensor, layouts: Mapping[int, BlockKV]) -> frozenset[tuple[int, str]]:
    """Returns block and path of each module whose weight is read, but which is not called, in a prompt or in a step."""
    session = Session(cut, layouts)
    session.run(hidden[:, :2])
    # Some are called with a prompt only, as Mamba's convolution is: an adapter would hold for that alone.
    of_step = _not_called_in(cut, lambda: session.run(hidden[:, 2:]))
    return of_step | _not_called_in(cut, lambda: run(cut, hidden))


def _not_called_in(cut: CutModel, call: Callable[[], object]) -> frozenset[tuple[int, str]]:
    """Runs a model; returns block and path of each module with a weight that was not called, although its parent was.

    A parent that is not called either may be an expert to which no token went.
    """
    modules = {block: dict(cut.layers[block].named_modules()) for block in cut.blocks}
    called: set[nn.Module] = set()
    hooks = [
        module.register_forward_pre_hook(lambda module, _: called.add(module))
        for named in modules.values()
        for module in named.values()
    ]
    try:
        call()
    finally:
        for hook in hooks:
            hook.remove()
    return frozenset(
        (block, path)
        for block, named in modules.items()
        for path, module in named.items()
        if path and module not in called and "weight" in module._parameters and named[path.rpartition(".")[0]] in called
    )
