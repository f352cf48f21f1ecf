"""The distillation loss against the formula written out, its gradient, and the memory it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from swarm_plugins.distill import distillation_loss, loss
from swarm_plugins.errors import ConfigError


def brute_force(student: Tensor, teacher: Tensor, labels: Tensor, mask: Tensor | None, temperature: float) -> Tensor:
    """The loss, token by token."""
    terms = []
    for row in range(labels.shape[0]):
        for position in range(labels.shape[1] - 1):
            is_padding = mask is not None and not (mask[row, position] and mask[row, position + 1])
            if labels[row, position + 1] == -100 or is_padding:
                continue
            p = (teacher[row, position].double() / temperature).softmax(-1)
            q = (student[row, position].double() / temperature).softmax(-1)
            terms.append((p * (p.log() - q.log())).sum())
    return temperature**2 * torch.stack(terms).mean()


def logits(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.fixture
def labels() -> Tensor:
    labels = torch.randint(0, 11, (3, 7), generator=torch.Generator().manual_seed(0))
    labels[0, :3] = -100
    labels[2, 5] = -100
    return labels


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("masked", [False, True], ids=["no-mask", "mask"])
@pytest.mark.parametrize("piece", [1, 24, 1 << 22], ids=["token-by-token", "two-tokens", "at-once"])
def test_loss_and_gradient_equal_the_formula(
    temperature: float, masked: bool, piece: int, labels: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "_PIECE_NUMBERS", piece)
    mask = torch.ones(3, 7, dtype=torch.long)
    mask[1, :2] = 0
    mask[2, 4:] = 0
    ours, theirs = (logits(3, 7, 11, seed=1).requires_grad_() for _ in range(2))
    teacher = logits(3, 7, 11, seed=2)
    found = distillation_loss(ours, teacher, labels, temperature=temperature, attention_mask=mask if masked else None)
    expected = brute_force(theirs, teacher, labels, mask if masked else None, temperature)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7)
    (found * 3).backward()
    (expected * 3).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-7)


def test_two_batches_with_the_trainers_divisor_are_one_batch(labels: Tensor) -> None:
    ours, teacher = logits(3, 7, 11, seed=1), logits(3, 7, 11, seed=2)
    num_items = (labels[:, 1:] != -100).sum()
    whole = distillation_loss(ours, teacher, labels)
    parts = [distillation_loss(ours[rows], teacher[rows], labels[rows], num_items=num_items) for rows in ([0], [1, 2])]
    torch.testing.assert_close(parts[0] + parts[1], whole)


def test_a_batch_without_a_token_that_counts_is_zero_with_zero_gradient() -> None:
    ours = logits(2, 4, 11, seed=1).requires_grad_()
    found = distillation_loss(ours, logits(2, 4, 11, seed=2), torch.full((2, 4), -100))
    found.backward()
    assert found.item() == 0
    assert ours.grad is not None
    assert not ours.grad.any()


def test_tokens_that_the_teacher_excludes_add_nothing(labels: Tensor) -> None:
    ours, teacher = logits(3, 7, 11, seed=1), logits(3, 7, 11, seed=2)
    ours[..., 5:], teacher[..., 5:] = -torch.inf, -torch.inf
    ours.requires_grad_()
    found = distillation_loss(ours, teacher, labels)
    torch.testing.assert_close(found, distillation_loss(ours[..., :5], teacher[..., :5], labels))
    found.backward()
    assert ours.grad is not None
    assert ours.grad.isfinite().all()


def test_equal_models_have_no_divergence(labels: Tensor) -> None:
    ours = logits(3, 7, 11, seed=1).requires_grad_()
    found = distillation_loss(ours, ours.detach().clone(), labels, temperature=2.0)
    found.backward()
    assert abs(found.item()) < 1e-6
    assert ours.grad is not None
    assert ours.grad.abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_bits_are_widened_before_the_sum(dtype: torch.dtype, labels: Tensor) -> None:
    ours, teacher = logits(3, 7, 11, seed=1).to(dtype), logits(3, 7, 11, seed=2)
    found = distillation_loss(ours, teacher, labels)
    torch.testing.assert_close(found, distillation_loss(ours.float(), teacher, labels))


def test_a_loss_scaler_saves_small_gradients_in_float16() -> None:
    labels = torch.zeros(1, 4096, dtype=torch.long)
    ours = logits(1, 4096, 50, seed=1).half().requires_grad_()
    teacher = ours.detach() + 0.01 * logits(1, 4096, 50, seed=2).half()
    (distillation_loss(ours, teacher, labels) * 2.0**14).backward()
    assert ours.grad is not None
    # Without the scale, most of these would be below the smallest number of float16.
    assert (ours.grad[0, :-1] != 0).float().mean() > 0.9


class Largest(TorchDispatchMode):
    """Counts new tensors of at least so many numbers."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.numbers = numbers
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {one.untyped_storage().data_ptr() for one in args if isinstance(one, Tensor)}
        if isinstance(result, Tensor) and result.numel() >= self.numbers:
            self.count += result.untyped_storage().data_ptr() not in known
        return result


def test_a_large_vocabulary_is_never_copied_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "_PIECE_NUMBERS", 4000)
    ours = logits(2, 50, 1000, seed=1).requires_grad_()
    teacher = logits(2, 50, 1000, seed=2)
    labels = torch.zeros(2, 50, dtype=torch.long)
    with Largest(ours.numel() // 4) as forward:
        found = distillation_loss(ours, teacher, labels)
    with Largest(ours.numel() // 4) as backward:
        found.backward()
    assert forward.count == 0
    assert backward.count == 1, "the gradient of the logits itself"


def test_another_vocabulary_names_both_sizes() -> None:
    with pytest.raises(ConfigError, match=r"teacher's vocabulary has 12 tokens, the student's 11.*make_student"):
        distillation_loss(logits(1, 4, 11, seed=0), logits(1, 4, 12, seed=0), torch.zeros(1, 4, dtype=torch.long))


def test_other_shapes_are_named() -> None:
    with pytest.raises(ConfigError, match=r"student \[1, 6, 11\].*labels \[1, 4\].*soft prompts"):
        distillation_loss(logits(1, 6, 11, seed=0), logits(1, 6, 11, seed=0), torch.zeros(1, 4, dtype=torch.long))
