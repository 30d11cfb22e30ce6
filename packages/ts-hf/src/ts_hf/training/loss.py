"""Cross-entropy of a causal language model without its logits, where that is the model's own loss.

The model runs as always, but computes logits for the last position only; a hook keeps the hidden
states of every position, and the chunked kernel does the rest with the head's weight. Whether this
is what the model itself computes is checked once, on the model, rather than by name: the head must
be a plain nn.Linear applied to the decoder's last hidden state, with nothing after it. Anything
else (a capped, scaled or adapted head, a router loss) keeps the model's own loss.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ts_hf.families import base_causal_lm

KERNEL = "chunked_cross_entropy"
_PROBE_TOKENS = 8
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
        self._decided: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()

    def applies(self, model: nn.Module, inputs: dict[str, Any]) -> bool:
        """Whether this gives the model's own loss for `inputs`; decided once per model."""
        if "input_ids" not in inputs or not ("labels" in inputs or "shift_labels" in inputs):
            return False
        if model not in self._decided:
            reason = _why_not(model, inputs)
            self._decided[model] = reason is None
            if reason is not None:
                self._say(f"chunked_loss: the model's own loss is used, since {reason}")
        return self._decided[model]

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
        inner = base_causal_lm(model)
        with _capture(_decoder(inner)) as captured:
            outputs = model(**rest, logits_to_keep=1)
        hidden = captured.pop()
        head: Any = inner.get_output_embeddings()  # type: ignore[operator]
        if hidden.dtype != head.weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(head.weight.dtype)
        with autocast():
            loss: Tensor = kernels.get(KERNEL).fn(
                hidden,
                head.weight,
                targets.to(hidden.device),
                head.bias,
                chunk_size=self.chunk_size,
                ignore_index=_IGNORED,
                num_items=num_items,
            )
        return loss, outputs


def _targets(inputs: dict[str, Any]) -> Tensor:
    """Labels [B, T] such that position t is to predict target t."""
    if inputs.get("shift_labels") is not None:
        given: Tensor = inputs["shift_labels"]
        return given
    return F.pad(inputs["labels"], (0, 1), value=_IGNORED)[..., 1:].contiguous()


def _why_not(model: nn.Module, inputs: dict[str, Any]) -> str | None:
    """None if the chunked loss equals the model's own, else the reason in words."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    from ts_core.registry import kernels

    if not kernels.has(KERNEL):
        return "the chunked kernel is not installed (pip install ts-kernels)"
    inner: Any = base_causal_lm(model)
    config = getattr(inner, "config", None)
    peft_config = getattr(model, "active_peft_config", None)
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    if type(head) is not nn.Linear:
        return f"its head is a {type(head).__name__}, not a plain nn.Linear"
    if getattr(peft_config, "is_prompt_learning", False):
        return "prompt learning adds tokens that the labels do not have"
    if "logits_to_keep" not in inspect.signature(inner.forward).parameters:
        return f"{type(inner).__name__} always computes all logits"
    if getattr(inner, "loss_function", None) is not ForCausalLMLoss:
        return f"{type(inner).__name__} has a loss of its own"
    if getattr(config, "output_router_logits", False):
        return "it adds a router loss"
    if getattr(config, "final_logit_softcapping", None) is not None:
        return "it caps its logits"
    if _decoder(inner) is None:
        return f"the decoder of {type(inner).__name__} was not found"
    if not _head_is_last(model, inner, head, inputs):
        return "its logits are not simply the head applied to the last hidden state"
    return None


@torch.no_grad()
def _head_is_last(model: nn.Module, inner: Any, head: nn.Linear, inputs: dict[str, Any]) -> bool:
    """Run a few tokens: head input == last hidden state, and logits == head output."""
    tokens = inputs["input_ids"][:1, :_PROBE_TOKENS]
    training = model.training
    model.eval()
    try:
        with _capture(_decoder(inner)) as hidden, _capture(head, inputs=True) as seen:
            logits = model(input_ids=tokens).logits
    finally:
        model.train(training)
    if len(hidden) != 1 or len(seen) != 2:
        return False
    head_input, head_output = seen
    return (
        torch.equal(head_input, hidden[0])
        and logits.shape == head_output.shape
        and torch.equal(logits.to(head_output.dtype), head_output)
    )


def _decoder(inner: Any) -> Any:
    """The module whose output is the last hidden state."""
    if hasattr(inner, "get_decoder"):
        found = inner.get_decoder()
        if found is not None and found is not inner:
            return found
    found = getattr(inner, "base_model", None)
    return None if found is inner else found


class _capture(AbstractContextManager[list[Tensor]]):
    """Collects what `module` returns while the block runs (and is given, with `inputs`)."""

    def __init__(self, module: Any, *, inputs: bool = False) -> None:
        self._module = module
        self._inputs = inputs
        self._found: list[Tensor] = []

    def __enter__(self) -> list[Tensor]:
        self._handle = self._module.register_forward_hook(self._hook)
        return self._found

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _hook(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._inputs:
            self._found.append(args[0])
        value = output
        if not isinstance(output, Tensor):
            value = output[0] if isinstance(output, tuple) else output.last_hidden_state
        self._found.append(value)
