"""Cross-entropy of a causal language model without its logits, where that is the model's own loss.

The model runs as always, but computes logits for the last position only; a hook keeps the hidden
states of every position, and the chunked kernel does the rest with the head's weight and its LoRA
adapter. Anything else (a capped or scaled head, a router loss, a loss of the model's own) keeps the
model's own loss; see `ts_hf.heads` for how that is found out.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ts_hf.families import base_causal_lm
from ts_hf.heads import HeadCheck, HeadWeights, head_weights, last_hidden_state

KERNEL = "chunked_cross_entropy"
_IGNORED = -100


class ChunkedLoss:
    """The loss of a batch, by chunks of rows of logits.

    Args:
        chunk_size: rows of logits that exist at a time.
        say: called with one line of plain words when the model's own loss is used instead.
    """

    def __init__(self, chunk_size: int, say: Callable[[str], None]) -> None:
        self.chunk_size = chunk_size
        self._say = say
        self._heads = HeadCheck()
        self._said: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()

    def applies(self, model: nn.Module, inputs: dict[str, Any]) -> bool:
        """Whether this gives the model's own loss for `inputs`; the model is run once for it."""
        if "input_ids" not in inputs or not ("labels" in inputs or "shift_labels" in inputs):
            return False
        reason = _has_another_loss(model)
        if reason is None:
            reason = self._heads.why_not(model, inputs["input_ids"], KERNEL)
        if reason is not None and self._said.get(model) != reason:
            self._said[model] = reason
            self._say(f"chunked_loss: the model's own loss is used, since {reason}")
        return reason is None

    def __call__(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items: int | Tensor | None,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> tuple[Tensor, Any]:
        """The loss of one micro-batch.

        Args:
            model: the model that `applies` agreed to.
            inputs: as for the model: input_ids [B, T], labels [B, T] (shifted here) or
                shift_labels, and what else its forward takes.
            num_items: labels that count in the whole accumulation window, which divides the sum;
                None for the mean over this batch.
            autocast: context in which the head is multiplied.

        Returns:
            (0-d fp32 loss, the model's output, with logits of the last position only).
        """
        from ts_core.registry import kernels

        rest = {
            name: value for name, value in inputs.items() if name not in ("labels", "shift_labels")
        }
        targets = _targets(inputs)
        hidden, outputs = last_hidden_state(model, rest)
        head = head_weights(model)
        assert isinstance(head, HeadWeights)
        with autocast():
            loss: Tensor = kernels.get(KERNEL).fn(
                hidden,
                head.weight,
                targets.to(hidden.device),
                head.bias,
                chunk_size=self.chunk_size,
                ignore_index=_IGNORED,
                num_items=num_items,
                lora=head.lora,
            )
        return loss, outputs


def _targets(inputs: dict[str, Any]) -> Tensor:
    """Labels [B, T] such that position t is to predict target t."""
    if inputs.get("shift_labels") is not None:
        given: Tensor = inputs["shift_labels"]
        return given
    return F.pad(inputs["labels"], (0, 1), value=_IGNORED)[..., 1:].contiguous()


def _has_another_loss(model: nn.Module) -> str | None:
    """None if the model's loss is the cross-entropy of its logits alone, else the reason."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    inner: Any = base_causal_lm(model)
    if getattr(inner, "loss_function", None) is not ForCausalLMLoss:
        return f"{type(inner).__name__} has a loss of its own"
    if getattr(getattr(inner, "config", None), "output_router_logits", False):
        return "it adds a router loss"
    return None
