"""The output layer of a causal language model, for losses that never build the logits.

Such a loss takes the last hidden state of every position and the head's weight. Whether those give
the model's own logits is checked once, on the model, rather than by name: the head must be applied
to the decoder's last hidden state, with nothing after it. A LoRA adapter on the head is read anew
at each use, so that switched-off and replaced adapters count.
"""

from __future__ import annotations

import inspect
import weakref
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ts_core.optim.read_guard import ParameterInFlight
from ts_core.registry import kernels
from ts_hf.families import base_causal_lm, text_decoder

_PROBE_TOKENS = 8


class Adapter(NamedTuple):
    """A LoRA adapter as the kernels take it: `a` [r, D], `b` [V, r]."""

    a: Tensor
    b: Tensor
    scaling: float


class HeadWeights(NamedTuple):
    """What a head multiplies with: `weight` [V, D], `bias` [V] or None, and an adapter or None."""

    weight: Tensor
    bias: Tensor | None
    lora: Adapter | None


class HeadCheck:
    """Which models' logits are their head applied to their last hidden state."""

    def __init__(self) -> None:
        self._structure: weakref.WeakKeyDictionary[nn.Module, str | None] = (
            weakref.WeakKeyDictionary()
        )

    def why_not(self, model: nn.Module, input_ids: Tensor, kernel: str) -> str | None:
        """None if `kernel` with `head_weights(model)` stands for the logits, else the reason.

        Args:
            model: a causal language model, in a PEFT wrapper or not.
            input_ids: [B, T]; a few of them are run through the model the first time.
            kernel: name of the installed kernel that is to be used.
        """
        if not kernels.has(kernel):
            return "the chunked kernel is not installed (pip install 'ts-kernels>=0.8,<0.9')"
        weights = head_weights(model)
        if isinstance(weights, str):
            return weights
        if model not in self._structure:
            self._structure[model] = _why_not(model, input_ids)
        return self._structure[model]


def head_weights(model: nn.Module) -> HeadWeights | str:
    """The head's weights as they are now, or the reason why they are not all there is to it."""
    inner: Any = base_causal_lm(model)
    head: Any = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    if type(head) is nn.Linear:
        return HeadWeights(_landed(head.weight), head.bias, None)
    base = getattr(head, "base_layer", None)
    if type(base) is not nn.Linear or not hasattr(head, "lora_A"):
        return f"its head is a {type(head).__name__}, not a plain nn.Linear"
    plain = HeadWeights(_landed(base.weight), base.bias, None)
    if head.merged:
        return "its head has a merged adapter" if head.disable_adapters else plain
    active = [name for name in head.active_adapters if name in head.lora_A]
    if head.disable_adapters or not active:
        return plain
    if len(active) > 1:
        return f"its head has {len(active)} active adapters"
    (name,) = active
    a, b, dropout = head.lora_A[name], head.lora_B[name], head.lora_dropout[name]
    if name in getattr(head, "lora_variant", {}):
        return "the adapter of its head is not plain LoRA"
    if a.bias is not None or b.bias is not None:
        return "the adapter of its head has a bias"
    if getattr(dropout, "p", 0.0) > 0 and dropout.training:
        return "the adapter of its head has dropout"
    adapter = Adapter(_landed(a.weight), _landed(b.weight), float(head.scaling[name]))
    return plain._replace(lora=adapter)


def last_hidden_state(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, Any]:
    """Run `model` on `inputs`, without labels, computing logits for the last position only.

    Returns:
        (hidden [B, T, D] of the last norm, in the head's dtype unless autocast converts it; the
        model's output).
    """
    inner: Any = base_causal_lm(model)
    with capture(text_decoder(inner)) as captured:
        outputs = model(**inputs, logits_to_keep=1)
    hidden = captured.pop()
    if torch.is_autocast_enabled(hidden.device.type):
        torch.clear_autocast_cache()  # the head's copy for one position, and those of the blocks
    weights = head_weights(model)
    assert not isinstance(weights, str)  # the caller has asked why_not
    if not torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(weights.weight.dtype)
    return hidden, outputs


class capture(AbstractContextManager[list[Tensor]]):
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


def _landed(weight: Any) -> Tensor:
    """A parameter whose update is in flight as an ordinary tensor, after waiting for it.

    On a GPU it keeps its special class until a later read finds the copy done; a kernel would take
    it for a subclass with arithmetic of its own.
    """
    if type(weight) is ParameterInFlight:
        return weight.view_as(weight)
    tensor: Tensor = weight
    return tensor


def _why_not(model: nn.Module, input_ids: Tensor) -> str | None:
    inner: Any = base_causal_lm(model)
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        return "prompt learning adds tokens that the labels do not have"
    if "logits_to_keep" not in inspect.signature(inner.forward).parameters:
        return f"{type(inner).__name__} always computes all logits"
    if getattr(getattr(inner, "config", None), "final_logit_softcapping", None) is not None:
        return "it caps its logits"
    if text_decoder(inner) is None:
        return f"the decoder of {type(inner).__name__} was not found"
    if not _head_is_last(model, inner, input_ids):
        return "its logits are not simply the head applied to the last hidden state"
    return None


@torch.no_grad()
def _head_is_last(model: nn.Module, inner: Any, input_ids: Tensor) -> bool:
    """Run a few tokens: head input == last hidden state, and logits == head output."""
    training = model.training
    model.eval()
    try:
        with (
            capture(text_decoder(inner)) as hidden,
            capture(inner.get_output_embeddings(), inputs=True) as seen,
        ):
            logits = model(input_ids=input_ids[:1, :_PROBE_TOKENS]).logits
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
