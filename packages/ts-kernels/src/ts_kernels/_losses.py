"""Losses built on the two chunked ones."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ts_kernels._checks import check_head, check_targets
from ts_kernels._cross_entropy import chunked_cross_entropy
from ts_kernels._targets import shifted


def causal_lm_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, **kw: Any
) -> Tensor:
    """`chunked_cross_entropy` in which position t predicts the label at t + 1.

    Args:
        hidden: [..., T, D].
        weight: [V, D].
        labels: [..., T] integer, not shifted; -100 (or `ignore_index`) counts for nothing.
        bias: None or [V].
        **kw: as for `chunked_cross_entropy`. For `num_items` count the labels with
            `count_targets(labels, shift=True)`.

    Returns:
        0-d float32 loss.

    Raises:
        ValueError: as for `chunked_cross_entropy`.
    """
    check_head(hidden, weight, bias)
    if hidden.dim() < 2:
        raise ValueError(f"hidden has shape {tuple(hidden.shape)}; expected [..., T, D].")
    check_targets(labels, hidden, "labels")
    targets = shifted(labels, kw.get("ignore_index", -100))
    return chunked_cross_entropy(hidden, weight, targets, bias, **kw)


def dpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Direct preference optimization (Rafailov et al., 2023, equation 7).

        margin = (policy_chosen - reference_chosen) - (policy_rejected - reference_rejected)
        loss   = mean(-(1 - s) log sigmoid(beta * margin) - s log sigmoid(-beta * margin))

    with s = `label_smoothing`, the chance that a pair is labelled the wrong way round
    (conservative DPO, Mitchell 2023).

    Args:
        policy_chosen, policy_rejected: [B] log-probabilities from `sequence_logprobs`.
        reference_chosen, reference_rejected: [B], the same of the reference model.
        beta: strength of the pull towards the reference, above 0.
        label_smoothing: 0 up to but not including 0.5.

    Returns:
        (0-d loss, chosen rewards [B], rejected rewards [B]); rewards are
        beta * (policy - reference), detached. Float32 at least. An empty batch has loss 0.

    Raises:
        ValueError: the shapes differ, or an option is out of range.
    """
    shapes = {
        tuple(t.shape)
        for t in (policy_chosen, policy_rejected, reference_chosen, reference_rejected)
    }
    if len(shapes) != 1:
        raise ValueError(
            f"the four log-probabilities have shapes {sorted(shapes)}; expected one shape [B]. "
            f"Each chosen sequence needs its rejected one, in the same order."
        )
    if not beta > 0:
        raise ValueError(f"beta is {beta!r}; expected a number above 0.")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(
            f"label_smoothing is {label_smoothing!r}; expected 0 <= label_smoothing < 0.5."
        )
    chosen = _wide(policy_chosen) - _wide(reference_chosen)
    rejected = _wide(policy_rejected) - _wide(reference_rejected)
    logits = beta * (chosen - rejected)
    losses = -(1 - label_smoothing) * F.logsigmoid(logits)
    if label_smoothing:
        losses = losses - label_smoothing * F.logsigmoid(-logits)
    loss = losses.sum() / max(losses.numel(), 1)
    return loss, beta * chosen.detach(), beta * rejected.detach()


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype.itemsize >= 4 else values.float()
