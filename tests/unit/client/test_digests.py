"""Each span gets its part of an adapter; digests are computed once per change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from swarm_plugins.adapter_spec import AdapterModule, AdapterSpec, adapter_digest
from swarm_plugins.block_io import AdapterUse, LoadedAdapter
from swarm_plugins.client import digests as adapters_module
from swarm_plugins.client.digests import DigestCache


def adapter(blocks: range, rank: int = 2) -> LoadedAdapter:
    modules, tensors = [], []
    for block in blocks:
        shapes = ((rank, 4), (6, rank))
        modules.append(AdapterModule(block=block, module="self_attn.q_proj", kind="lora", shapes=shapes, scaling=2.0))
        tensors += [torch.full(shape, float(block + 1)) for shape in shapes]
    return LoadedAdapter(spec=AdapterSpec(modules=tuple(modules)), tensors=tuple(tensors))


def test_a_part_names_the_positions_of_its_tensors() -> None:
    selection = AdapterUse(adapters=(adapter(range(4)), adapter(range(1, 3))))
    part = DigestCache().part(selection, range(2, 4))
    assert part.indices == (4, 5, 6, 7, 10, 11)
    assert [module.block for module in part.shipped[0].spec.modules] == [2, 3]
    assert [tensor[0, 0].item() for tensor in part.shipped[1].tensors] == [3.0, 3.0]


def test_a_digest_changes_with_content_and_structure() -> None:
    one = adapter(range(1))
    digest = adapter_digest(one.spec, one.tensors)
    assert digest == adapter_digest(adapter(range(1)).spec, adapter(range(1)).tensors)
    changed = [one.tensors[0] + 1, one.tensors[1]]
    assert digest != adapter_digest(one.spec, changed)
    assert digest != adapter_digest(adapter(range(1, 2)).spec, one.tensors)


def test_unchanged_tensors_are_hashed_once_and_changed_ones_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*args: object) -> str:
        calls.append(args)
        return adapter_digest(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(adapters_module, "adapter_digest", counted)
    selection, cache = AdapterUse(adapters=(adapter(range(2)),)), DigestCache()
    first = cache.part(selection, range(2)).digests
    assert cache.part(selection, range(2)).digests == first
    assert len(calls) == 1
    with torch.no_grad():
        selection.adapters[0].tensors[0].add_(1.0)
    assert cache.part(selection, range(2)).digests != first
    assert len(calls) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.data.add_(1.0),
        lambda tensor: setattr(tensor, "data", tensor.data + 1),
        lambda tensor: tensor.detach().numpy().__iadd__(1),
        lambda tensor: tensor.data.neg_(),
    ],
    ids=["data", "set-data", "numpy", "sign"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_changes_that_autograd_does_not_see_are_seen(
    change: Callable[[torch.Tensor], object], dtype: torch.dtype
) -> None:
    plain = adapter(range(2))
    selection = AdapterUse(adapters=(plain.map(lambda tensor: tensor.to(dtype)),))
    cache = DigestCache()
    before = cache.part(selection, range(2)).digests
    change(selection.adapters[0].tensors[1])
    after = cache.part(selection, range(2)).digests
    assert after != before
    assert after == (adapter_digest(plain.spec, selection.adapters[0].tensors),)


def test_between_tokens_values_are_not_looked_at() -> None:
    selection, cache = AdapterUse(adapters=(adapter(range(2)),)), DigestCache()
    before = cache.part(selection, range(2)).digests
    selection.adapters[0].tensors[1].data.add_(1.0)
    assert cache.part(selection, range(2), verify=False).digests == before
    assert cache.part(selection, range(2)).digests != before


def test_few_parts_are_remembered() -> None:
    cache = DigestCache(capacity=2)
    for _ in range(5):
        cache.part(AdapterUse(adapters=(adapter(range(2)),)), range(2))
    assert len(cache._cuts) == len(cache._named) == 2


def test_an_adapter_of_inference_mode_has_a_digest() -> None:
    with torch.inference_mode():
        made = adapter(range(1))
    shipped = DigestCache().part(AdapterUse(adapters=(made,)), range(1)).shipped
    assert shipped[0].digest == adapter_digest(made.spec, made.tensors)
