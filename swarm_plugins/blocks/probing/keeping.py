"""Whether a family keeps states by means of its own, and where."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from swarm_plugins.blocks.calls import Call, SkippedBlock
from swarm_plugins.blocks.cut_model import CutModel
from swarm_plugins.blocks.keepers import (
    InCacheClass,
    InModules,
    InObject,
    Keeper,
    Path,
    Place,
    Places,
    attributes,
    further_attributes,
    in_class,
    leaves,
)
from swarm_plugins.blocks.past import ProbePast
from swarm_plugins.blocks.probing.runs import FAULTS, SEED, random, run
from swarm_plugins.columns import Arguments, arguments_of
from swarm_plugins.errors import UnsupportedError

_ROWS = (2, 3)
"""Of two runs, to tell the dimension of the batch."""
Found = Mapping[Path, Tensor]


def learn_keeper(cut: CutModel, hidden: Tensor) -> None:
    """Finds out how a family keeps states; sets ``cut.keeper``, and ``cut.handed`` if its layers hand on an object.

    Raises:
        UnsupportedError: If it keeps some that belong to no block.
    """
    try:
        with _noted(cut) as noted:
            run(cut, hidden, ProbePast(cut.blocks, cut.own_layers))
            has_kept = bool(noted())
    except FAULTS as error:
        cut.keeper = _keeper_of_object(cut, error)
    else:
        places = _places_on_modules(cut) if has_kept else {}
        cut.keeper = InModules(places, cut.layers) if places else None


def _keeper_of_object(cut: CutModel, error: Exception) -> Keeper:
    """Returns the keeper for a family that takes no cache of transformers, by what it makes if it is given none."""
    cut.handed = _handed(cut)
    rows = _ROWS[0]
    try:
        output = _run_own(cut, rows, range(0))
        name = next(name for name, value in output.items() if name == cut.cache_name)
    except (*FAULTS, StopIteration):
        raise error from None
    made = output[name]
    if isinstance(made, DynamicCache):
        family = type(made)
        return InCacheClass(_places(cut, lambda rows, blocks: _in_class(cut, family, rows, blocks)), family)
    if isinstance(made, Cache):
        raise error

    def found(rows: int, blocks: range) -> Found:
        return dict(leaves(attributes(_run_own(cut, rows, blocks)[name])))

    return InObject(_places(cut, found), name, lambda rows: _run_own(cut, rows, range(0), 1)[name])


def _run_own(cut: CutModel, rows: int, blocks: range, num_tokens: int = 3) -> Any:
    """Returns the output of a model that makes its cache itself, when some blocks run on random tokens."""
    call = Call(blocks=blocks, table=_table(cut, rows, blocks, num_tokens), attention=cut.attention)
    ids = torch.zeros(rows, num_tokens, dtype=torch.long, device=cut.device)
    return cut.run_model(call, ids, makes_cache=True)


def _in_class(cut: CutModel, family: type[DynamicCache], rows: int, blocks: range) -> Found:
    past = in_class(ProbePast(blocks, cut.own_layers), family)
    call = Call(blocks=blocks, table=_table(cut, rows, blocks, 3), attention=cut.attention)
    cut.run_model(call, torch.zeros(rows, 3, dtype=torch.long, device=cut.device), past=past)
    names = further_attributes(family)  # type: ignore[arg-type]  # classes are hashable
    return dict(leaves({name: vars(past)[name] for name in names}))


class _OnRandom:
    """A block that runs on random hidden states, whatever it is given."""

    def __init__(self, layer: Callable[..., Any], hidden: Tensor) -> None:
        self._layer = layer
        self._hidden = hidden

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._layer(self._hidden, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _table(cut: CutModel, rows: int, blocks: range, num_tokens: int) -> list[Any]:
    table = list(cut.table(blocks))
    for block in blocks:
        hidden = random(cut, torch.Generator().manual_seed(SEED), rows, num_tokens)
        table[block] = _OnRandom(table[block], cut.columns.split(hidden)[0])
    return table


def _places(cut: CutModel, found: Callable[[int, range], Found]) -> Places:
    """Returns where the states of each block are, given what is kept when so many rows run through some blocks."""
    before = found(_ROWS[0], range(0))
    places: dict[int, list[Place]] = {}
    for block in cut.blocks:
        alone = range(block, block + 1)
        two, three = (found(rows, alone) for rows in _ROWS)
        changed = {
            path: tensor for path, tensor in two.items() if path not in before or not torch.equal(before[path], tensor)
        }
        places[block] = []
        for path, tensor in changed.items():
            rows = _rows_dim(tensor, three[path])
            if rows is not None:  # else a number of tokens
                places[block].append(_place(cut, block, path, rows, tensor, before.get(path)))
    return places


def _rows_dim(two: Tensor, three: Tensor) -> int | None:
    sizes = zip(two.shape, three.shape, strict=True)
    return next((dim for dim, pair in enumerate(sizes) if pair == _ROWS), None)


def _place(cut: CutModel, block: int, path: Path, rows: int, after: Tensor, before: Tensor | None) -> Place:
    for dim, size in enumerate(after.shape):
        if dim == rows or size != len(cut.layers) or before is None:
            continue
        others = [index for index in range(size) if index != block]
        if all(torch.equal(after.select(dim, index), before.select(dim, index)) for index in others):
            return Place(path, rows, dim)
    if block not in path:
        raise UnsupportedError(
            f"{type(cut.model).__name__} keeps a state that belongs to no block ({'.'.join(map(str, path))}): use a "
            "model of another family"
        )
    return Place(path, rows)


@contextmanager
def _noted(cut: CutModel) -> Iterator[Callable[[], dict[tuple[int, str, str], Tensor]]]:
    """Yields a function that returns the tensors that modules of blocks have kept since; at last they forget these."""
    modules = [(block, path, module) for block in cut.blocks for path, module in cut.layers[block].named_modules()]
    before = {id(module): dict(vars(module)) for _, _, module in modules}

    def kept() -> dict[tuple[int, str, str], Tensor]:
        return {
            (block, path, name): value
            for block, path, module in modules
            for name, value in vars(module).items()
            if isinstance(value, Tensor) and value is not before[id(module)].get(name)
        }

    try:
        yield kept
    finally:
        for block, path, name in kept():
            module = cut.layers[block].get_submodule(path)
            setattr(module, name, before[id(module)].get(name))


def _places_on_modules(cut: CutModel) -> Places:
    found: list[dict[tuple[int, str, str], Tensor]] = []
    for rows in _ROWS:
        with _noted(cut) as kept:
            hidden = random(cut, torch.Generator().manual_seed(SEED), rows, 3)
            run(cut, hidden, ProbePast(cut.blocks, cut.own_layers))
            found.append(kept())
    places: dict[int, list[Place]] = {}
    for (block, path, name), tensor in found[0].items():
        rows_dim = _rows_dim(tensor, found[1][block, path, name])
        if rows_dim is not None:
            places.setdefault(block, []).append(Place((path, name), rows_dim))
    return places


class _Seen(Exception):
    """The first block has been called."""

    def __init__(self, arguments: Arguments) -> None:
        super().__init__()
        self.arguments = arguments


class _Stop(SkippedBlock):
    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise _Seen(arguments_of(args, kwargs))


def _handed(cut: CutModel) -> int | str | None:
    """Returns the argument of layers in which a family that keeps states itself gives them."""
    seen: list[Arguments] = []
    for makes_cache in (False, True):
        call = Call(blocks=cut.blocks, table=[_Stop(layer, 0) for layer in cut.layers], attention=cut.attention)
        try:
            cut.run_model(call, torch.zeros(1, 3, dtype=torch.long, device=cut.device), makes_cache=makes_cache)
        except _Seen as called:
            seen.append(called.arguments)
        except FAULTS:
            return None
    without, with_cache = seen
    given = (key for key, value in with_cache.items() if without.get(key) is None and any(True for _ in leaves(value)))
    return next(given, None)
