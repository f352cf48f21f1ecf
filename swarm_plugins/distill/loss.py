"""The distillation loss: KL divergence of the student's token distribution from the teacher's.

Letters in shapes: B rows, S positions, V tokens in the vocabulary, T tokens that count.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from swarm_plugins.errors import ConfigError

IGNORED_LABEL = -100
# Numbers in one piece of the logits, 16 MiB in float32: enough to keep a device busy.
_PIECE_NUMBERS = 1 << 22


def distillation_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    attention_mask: Tensor | None = None,
    num_items: Tensor | int | None = None,
) -> Tensor:
    """Returns ``temperature**2 * KL(teacher || student)`` of the next-token distributions, averaged over tokens.

    Both distributions are softened by the temperature; its square keeps the size of gradients (Hinton et al. 2015,
    section 2). Position ``t`` counts if the token at ``t + 1`` has a label and neither of the two is padding. The sum
    is taken in float32 over a few tokens at a time, so no second tensor of the logits' size exists in the forward pass.

    Args:
        student_logits: ``[B, S, V]``; the gradient goes here.
        teacher_logits: ``[B, S, V]``, of any floating type.
        labels: ``[B, S]``, as for a causal language model of transformers; -100 is ignored.
        temperature: Softens both distributions.
        attention_mask: ``[B, S]``, 0 at padding.
        num_items: Divisor of the sum, as transformers' Trainer passes it for gradient accumulation. None: the number of
            tokens that count.

    Returns:
        A scalar in float32; 0 if no token counts.

    Raises:
        ConfigError: If the shapes do not fit together.
    """
    check_shapes(student_logits, teacher_logits, labels)
    counted = counted_positions(labels, attention_mask)
    total = token_divergence(student_logits, teacher_logits, counted, temperature)
    divisor: Any = counted.sum().clamp(min=1) if num_items is None else num_items
    loss: Tensor = total * temperature**2 / divisor
    return loss


def check_shapes(student_logits: Tensor, teacher_logits: Tensor, labels: Tensor) -> None:
    """Raises ConfigError unless both logits are ``[B, S, V]`` and the labels ``[B, S]``."""
    if student_logits.shape[-1] != teacher_logits.shape[-1]:
        raise ConfigError(
            f"the teacher's vocabulary has {teacher_logits.shape[-1]} tokens, the student's "
            f"{student_logits.shape[-1]}: distillation compares token by token; choose a teacher with the student's "
            "tokenizer, or make the student with make_student(teacher, ...)"
        )
    if student_logits.shape != teacher_logits.shape or student_logits.shape[:-1] != labels.shape:
        raise ConfigError(
            f"logits of the student {list(student_logits.shape)} and the teacher {list(teacher_logits.shape)} and "
            f"labels {list(labels.shape)} do not fit together: expected [rows, positions, vocabulary] twice and "
            "[rows, positions]; soft prompts, which add positions, cannot be distilled this way"
        )


def counted_positions(labels: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """Returns which positions count, ``[B, S]``: those whose next token has a label and is not padding."""
    counted = torch.zeros_like(labels, dtype=torch.bool)
    counted[:, :-1] = labels[:, 1:] != IGNORED_LABEL
    if attention_mask is not None and attention_mask.shape == labels.shape:
        there = attention_mask.to(device=labels.device, dtype=torch.bool)
        counted[:, :-1] &= there[:, 1:] & there[:, :-1]
    return counted


def token_divergence(student_logits: Tensor, teacher_logits: Tensor, counted: Tensor, temperature: float) -> Tensor:
    """Returns the sum over counted positions of ``KL(teacher || student)`` at a temperature, without its square."""
    rows = counted.flatten().nonzero().squeeze(-1).to(student_logits.device)  # [T]
    student, teacher = (one.flatten(0, -2) for one in (student_logits, teacher_logits.detach()))  # [B S, V]
    total: Tensor = _SummedDivergence.apply(student, teacher, rows, temperature)  # type: ignore[no-untyped-call]
    return total


class _SummedDivergence(torch.autograd.Function):
    """Sum of the divergences of some rows; both passes hold one piece of probabilities at a time.

    The gradient is computed in the backward pass, where the factor of a loss scaler is known: in float16 the unscaled
    gradient would vanish.
    """

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, rows: Tensor, temperature: float) -> Tensor:
        ctx.save_for_backward(student, teacher, rows)
        ctx.temperature = temperature
        total = torch.zeros((), dtype=torch.float32, device=student.device)
        for piece in _pieces(rows, student.shape[-1]):
            ours, theirs = (_log_probabilities(one, piece, temperature) for one in (student, teacher))  # [t, V]
            # A token that a teacher excludes (logit -inf) adds nothing, also if the student excludes it too.
            difference = torch.where(theirs == -torch.inf, 0.0, theirs - ours)
            total += (theirs.exp_() * difference).sum()
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor, None, None, None]:
        student, teacher, rows = ctx.saved_tensors
        grad = torch.zeros_like(student)
        for piece in _pieces(rows, student.shape[-1]):
            ours, theirs = (_log_probabilities(one, piece, ctx.temperature) for one in (student, teacher))
            grad[piece] = ((ours.exp_() - theirs.exp_()) * (grad_total / ctx.temperature)).to(grad.dtype)
        return grad, None, None, None


def _pieces(rows: Tensor, vocabulary: int) -> tuple[Tensor, ...]:
    return rows.split(max(1, _PIECE_NUMBERS // vocabulary)) if len(rows) else ()


def _log_probabilities(logits: Tensor, rows: Tensor, temperature: float) -> Tensor:
    return (logits[rows].float() / temperature).log_softmax(-1)
