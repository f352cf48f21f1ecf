"""Which modules of blocks are read, but not called: an adapter there does nothing, locally as well."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from swarm_plugins.blocks.cut_model import CutModel


def never_called(cut: CutModel, run: Callable[[], object]) -> frozenset[tuple[int, str]]:
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
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return frozenset(
        (block, path)
        for block, named in modules.items()
        for path, module in named.items()
        if path and module not in called and "weight" in module._parameters and named[path.rpartition(".")[0]] in called
    )
