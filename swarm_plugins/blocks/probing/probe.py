"""What has to be found out about a cut-down model by running it, once, when it has been loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from swarm_plugins.blocks.cut_model import CutModel
from swarm_plugins.blocks.layout import BlockKV
from swarm_plugins.blocks.packed import Packing
from swarm_plugins.blocks.probing.arguments import mask_kinds, position_planes, takes_ids
from swarm_plugins.blocks.probing.called import never_called
from swarm_plugins.blocks.probing.form import learn_form
from swarm_plugins.blocks.probing.keeping import learn_keeper
from swarm_plugins.blocks.probing.layouts import layouts_of
from swarm_plugins.blocks.probing.packs import packing_of, takes_rows, takes_several
from swarm_plugins.blocks.probing.windows import with_windows


class Traits(NamedTuple):
    """What a probe found out."""

    kv_layouts: Mapping[int, BlockKV]
    """What each block caches."""
    packing: Packing
    """How sessions can share a forward."""
    takes_several: bool
    """Whether several tokens may follow cached ones at once."""
    takes_rows: bool
    """Whether a token of several rows may run at once."""
    never_called: frozenset[tuple[int, str]]
    """Block and path of modules whose weight is read by others."""
    takes_ids: bool = False
    """Whether blocks take the ids of tokens."""
    mask_kinds: tuple[str, ...] = ()
    """Kinds of layers that take masks which are made for them; one empty name if all take the same. Empty: none do."""
    position_planes: tuple[int, ...] = ()
    """How many planes positions may have, besides one alone."""


def probe(cut: CutModel) -> Traits:
    """Runs a model to learn what it caches and how sessions can share a forward.

    Sets ``cut.columns``, ``cut.hidden_size``, ``cut.num_returned``, ``cut.keeper``, ``cut.handed``, and
    ``cut.attention`` if it does not fit the model.

    Raises:
        UnsupportedError: If blocks depend on more than hidden states, or do without attention.
    """
    with torch.no_grad():
        hidden = learn_form(cut)
        are_ids_taken = takes_ids(cut, hidden)
        learn_keeper(cut, hidden)
        layouts = layouts_of(cut, hidden)
        packing, kinds = packing_of(cut, layouts), mask_kinds(cut, hidden)
        return Traits(
            with_windows(cut, layouts, packing, kinds),
            packing=packing,
            takes_several=takes_several(cut, hidden, layouts),
            takes_rows=takes_rows(cut, hidden, layouts),
            never_called=never_called(cut, hidden, layouts),
            takes_ids=are_ids_taken,
            mask_kinds=kinds,
            position_planes=position_planes(cut, hidden),
        )
