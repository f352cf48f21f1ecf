"""Speculative loading: the next layers' routers predict early which experts their layers will need.

Hidden states change little from layer to layer, so the next layer's router applied to this layer's input finds most of
the experts that the next layer will choose (Eliseev and Mazur 2023, section 3.2). The change is similar for every
token: its mean, added to the input, improves the guess (docs/benchmarks.md).
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from swarm_plugins.offload.cache.cache import BoundedCache

log = logging.getLogger(__name__)

MAX_ROWS = 4
"""Most tokens in a pass that is guessed for: more tokens need most experts anyway."""

LOOK_AHEAD = 2
"""Layers guessed ahead: while the next one's experts are at hand, the disk reads the experts of the one behind."""

# Share of the newest difference in the mean, and tokens between differences after the first few: the mean moves slowly,
# and updating it costs a layer as much time as asking a router.
_DRIFT_RATE = 0.2
_DRIFT_STEP = 4
_FIRST_DRIFTS = 8
_ROUTERS = ("gate", "router")


def install_prefetch(model: nn.Module, cache: BoundedCache) -> None:
    """Makes a model announce to its cache what the next layers will probably need, and how many tokens it saw.

    Routers that need inputs not known early (token ids, another layer's state) are left alone: their layers are not
    guessed.
    """
    routers = find_routers(model)
    layers = sorted(cache.num_experts)
    if len(routers) != len(layers):
        log.info("no speculative loading: %d routers found for %d layers of experts", len(routers), len(layers))
        return
    predictor = _Predictor(cache)
    for layer, router in zip(layers, routers, strict=True):
        router.register_forward_pre_hook(predictor.hook(layer), with_kwargs=True)
    if cache.config.prefetch:
        cache.on_asked = predictor.predict


class _Extra(NamedTuple):
    """Arguments of a router in addition to the hidden states."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    def is_same(self, other: _Extra) -> bool:
        """Returns whether both hold the same objects: parameters, not values computed for each token."""
        mine, theirs = (
            ([*map(id, one.arguments)], {name: id(value) for name, value in one.keywords.items()})
            for one in (self, other)
        )
        return mine == theirs


@dataclass(slots=True)
class _Seen:
    """State of one router; copies of a model have routers of their own."""

    extra: _Extra | None = None
    following: weakref.ref[nn.Module] | None = None
    """The next layer's router."""
    hidden: Tensor | None = None
    """Its last input, ``[..., D]``."""
    drift: Tensor | None = None
    """Mean difference between the input of the router before and this one's, ``[D]``."""

    def note_drift(self, before: Tensor | None, now: Tensor | None) -> None:
        """Updates the mean with the inputs of the router before and of this one; None: of many rows."""
        if now is None or before is None or not now.numel():
            return
        if now.shape != before.shape or not _is_alike(now, before):
            return
        drift, mean = self.drift, (now - before).reshape(-1, now.shape[-1]).mean(0)
        if drift is not None and _is_alike(drift, mean):
            mean = torch.lerp(drift, mean, _DRIFT_RATE)
        # An overflowed pass must not stay in the mean forever.
        if bool(mean.isfinite().all()):
            self.drift = mean


class _Predictor:
    """Applies routers early, learning their order from their calls."""

    def __init__(self, cache: BoundedCache) -> None:
        self._cache = cache
        layers = sorted(cache.num_experts)
        self._next = dict(pairwise(layers))
        self._first = layers[0]
        self._last: tuple[int, weakref.ref[nn.Module], int] | None = None
        self._seen: weakref.WeakKeyDictionary[nn.Module, _Seen] = weakref.WeakKeyDictionary()
        # Layers whose router gets other objects each time, or answers unlike a router.
        self._unfit: set[int] = set()
        self._input: tuple[int, nn.Module, Tensor] | None = None
        self._has_all = False
        self._num_passes = 0
        self._is_learning = True

    def hook(self, layer: int) -> Any:
        """Returns a forward pre-hook for a router."""

        def note(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            self._input = None
            if not arguments or not isinstance(arguments[0], Tensor):
                self._unfit.add(layer)
                return
            hidden = arguments[0]
            num_rows = hidden.numel() // max(1, hidden.shape[-1])
            if layer == self._first:
                self._begin_pass(num_rows)
            if self._cache.on_asked is None or self._has_all or module.training:
                return
            # Detached, as its graph would keep a whole pass in memory; prompts are not kept.
            kept = hidden.detach() if num_rows <= MAX_ROWS else None
            self._note_router(layer, module, _Extra(arguments[1:], keywords), kept)
            if kept is not None:
                self._input = layer, module, kept

        return note

    def predict(self, layer: int) -> bool:
        """Guesses for the layers behind one that has just asked for its experts; returns whether there is a guess."""
        found, self._input = self._input, None
        if found is None or found[0] != layer:
            return False
        _, router, hidden = found
        has_guess = False
        for _ in range(LOOK_AHEAD):
            following, next_router = self._next.get(layer), self._following(router)
            if following is None or next_router is None:
                break
            layer, router = following, next_router
            seen = self._seen[router]
            if seen.drift is not None and _is_alike(seen.drift, hidden):
                hidden = hidden + seen.drift
            experts: Sequence[int] = ()
            if seen.extra is not None and layer not in self._unfit and not self._cache.is_complete(layer):
                experts = self._apply(layer, router, hidden, seen.extra)
            self._cache.guess(layer, experts)
            has_guess = has_guess or bool(experts)
        return has_guess

    def _following(self, router: nn.Module) -> nn.Module | None:
        seen = self._seen.get(router)
        return None if seen is None or seen.following is None else seen.following()

    def _apply(self, layer: int, router: nn.Module, hidden: Tensor, extra: _Extra) -> Sequence[int]:
        try:
            with torch.no_grad():
                # Not the call: its hooks record router logits, and this pass must not be recorded.
                answer = router.forward(hidden, *extra.arguments, **extra.keywords)
            chosen = answer[2]
            # [T, k], best first for each token: transposed, all first choices come before all second ones.
            experts = chosen.reshape(-1, chosen.shape[-1]).t().flatten().tolist()
        except ArithmeticError:
            # Some routers refuse what has overflowed; the next token's input may be fine.
            return ()
        except (TypeError, ValueError, RuntimeError, LookupError, AttributeError) as error:
            log.info("no speculative loading for layer %d: its router cannot be asked early: %r", layer, error)
            self._unfit.add(layer)
            return ()
        num_experts = self._cache.num_experts[layer]
        return [expert for expert in dict.fromkeys(experts) if isinstance(expert, int) and 0 <= expert < num_experts]

    def _note_router(self, layer: int, router: nn.Module, extra: _Extra, hidden: Tensor | None) -> None:
        seen = self._seen.setdefault(router, _Seen())
        seen.hidden = hidden
        thread = threading.get_ident()
        last, self._last = self._last, (layer, weakref.ref(router), thread)
        if last is not None and self._next.get(last[0]) == layer and (before := last[1]()) is not None:
            self._seen[before].following = self._last[1]
            # Other threads running the same model are at other tokens.
            if last[2] == thread and self._is_learning:
                seen.note_drift(self._seen[before].hidden, hidden)
        if layer in self._unfit:
            return
        if seen.extra is None:
            seen.extra = extra
        elif not seen.extra.is_same(extra):
            self._unfit.add(layer)
            seen.extra = None

    def _begin_pass(self, num_rows: int) -> None:
        self._cache.count_tokens(num_rows)
        # Then nothing is evicted any more, and nothing guessed.
        self._has_all = all(map(self._cache.is_complete, self._cache.num_experts))
        self._num_passes += 1
        self._is_learning = self._num_passes <= _FIRST_DRIFTS or self._num_passes % _DRIFT_STEP == 0


def _is_alike(one: Tensor, other: Tensor) -> bool:
    """Returns whether rows of two tensors can be added: a model may be moved or run in another type."""
    return (one.shape[-1], one.dtype, one.device) == (other.shape[-1], other.dtype, other.device)


def find_routers(model: nn.Module) -> list[nn.Module]:
    """Returns the routers next to experts, in the order of the model's modules."""
    found: list[nn.Module] = []
    for module in model.modules():
        children = dict(module.named_children())
        if "experts" in children:
            found.extend(children[name] for name in _ROUTERS if name in children)
    return found
