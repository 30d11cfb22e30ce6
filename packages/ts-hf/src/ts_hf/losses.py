"""Log-probabilities of whole sequences, for preference training (DPO).

    policy = causal_lm_logprobs(model, input_ids, labels)          # [B], differentiable
    reference = reference_logprobs(model, batches)                 # [all B], adapters off
    loss, chosen, rejected = dpo_loss(policy_c, policy_r, reference_c, reference_r)

No logits are built where the model's own are its head applied to its last hidden state (a LoRA
adapter on the head included); a model that caps or scales its logits uses its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ts_core.errors import DataError, OptionError
from ts_core.registry import kernels
from ts_hf.families import base_causal_lm
from ts_hf.heads import HeadCheck, HeadWeights, head_weights, last_hidden_state

__all__ = ["causal_lm_logprobs", "dpo_loss", "reference_logprobs"]

KERNEL = "sequence_logprobs"
_IGNORED = -100
_heads: weakref.WeakKeyDictionary[nn.Module, HeadCheck] = weakref.WeakKeyDictionary()


def causal_lm_logprobs(
    model: nn.Module,
    input_ids: Tensor,
    labels: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    chunk_size: int = 1024,
    average: bool = False,
    **kw: Any,
) -> Tensor:
    """The log-probability that `model` gives each sequence's labels.

    Differentiable; runs on the model's device and stream. The first call with a model also runs it
    on a few tokens, to see what its logits are made of.

    Args:
        model: a causal language model, wrapped or not, in a PEFT wrapper or not.
        input_ids: [B, T] int64.
        labels: [B, T], not shifted; -100 counts for nothing. None: the tokens themselves, but those
            that `attention_mask` hides.
        attention_mask: [B, T], or None.
        chunk_size: positions whose logits exist at a time.
        average: divide by the number of labels that count, per sequence.
        **kw: for the model's forward (position_ids, ...).

    Returns:
        [B] float32 (float64 of a float64 model); 0 where no label counts.

    Raises:
        ValueError: (DataError) labels or mask of another shape; (OptionError) chunk_size.
    """
    _check(input_ids, labels, attention_mask, chunk_size)
    if labels is None:
        labels = input_ids
        if attention_mask is not None:
            labels = labels.masked_fill(attention_mask == 0, _IGNORED)
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, **kw}
    inputs.setdefault("use_cache", False)
    check = _heads.setdefault(model, HeadCheck())
    if check.why_not(model, input_ids, KERNEL) is None:
        hidden, _ = last_hidden_state(model, inputs)
        head = head_weights(model)
        assert isinstance(head, HeadWeights)
        logprobs: Tensor = kernels.get(KERNEL).fn(
            hidden,
            head.weight,
            labels.to(hidden.device),
            head.bias,
            chunk_size=chunk_size,
            ignore_index=_IGNORED,
            average=average,
            lora=head.lora,
        )
        return logprobs
    return _from_logits(model(**inputs).logits, labels, chunk_size, average)


def reference_logprobs(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    chunk_size: int = 1024,
    average: bool = False,
) -> Tensor:
    """The log-probabilities that the reference model gives to sequences, computed once in advance.

    The reference is `model` with its adapters switched off; a model without adapters as it is now,
    so ask before training it. Where adapters start at the error of quantization
    (`error_rank`), the reference is the quantized model without that correction.

    Args:
        model: as for `causal_lm_logprobs`. Run in eval mode without gradients; afterwards its modes
            are as they were and its adapters on, whatever happens.
        batches: mappings with input_ids [B, T] and maybe labels and attention_mask, on any device.
        chunk_size, average: as for `causal_lm_logprobs`.

    Returns:
        [sum of the B] float32 on the CPU, in the order of the batches; [0] for none.

    Raises:
        What `causal_lm_logprobs` raises; ValueError: (DataError) a batch without input_ids.
    """
    inner: Any = base_causal_lm(model)
    device = inner.get_input_embeddings().weight.device
    found: list[Tensor] = []
    with torch.no_grad(), _evaluating(model), _adapters_off(model):
        for index, batch in enumerate(batches):
            if "input_ids" not in batch:
                raise DataError(f"batch {index} has no input_ids, but {', '.join(batch)}.")
            given = {
                name: torch.as_tensor(batch[name]).to(device)
                for name in ("input_ids", "labels", "attention_mask")
                if batch.get(name) is not None
            }
            found.append(causal_lm_logprobs(model, **given, chunk_size=chunk_size, average=average))
        # One copy at the end, so that no batch waits for the one before.
        return torch.cat(found).float().cpu() if found else torch.empty(0)


def dpo_loss(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`ts_kernels.dpo_loss`: direct preference optimization (Rafailov et al., 2023, equation 7).

    Args:
        *args, **kwargs: policy_chosen, policy_rejected, reference_chosen, reference_rejected, each
            [B]; beta=0.1, label_smoothing=0.0.

    Returns:
        (0-d loss, chosen rewards [B], rejected rewards [B]).

    Raises:
        RegistryError: ts-kernels is not installed; ValueError: as there.
    """
    result: tuple[Tensor, Tensor, Tensor] = kernels.get("dpo_loss").fn(*args, **kwargs)
    return result


def _check(
    input_ids: Tensor, labels: Tensor | None, attention_mask: Tensor | None, chunk_size: Any
) -> None:
    if not torch.is_tensor(input_ids) or input_ids.dim() != 2:
        shape = tuple(input_ids.shape) if torch.is_tensor(input_ids) else type(input_ids).__name__
        raise DataError(f"input_ids is {shape}; expected a tensor [B, T].")
    for name, given in (("labels", labels), ("attention_mask", attention_mask)):
        if given is not None and given.shape != input_ids.shape:
            raise DataError(
                f"{name} has shape {tuple(given.shape)}; expected {tuple(input_ids.shape)} as "
                f"input_ids. Labels are not shifted."
            )
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise OptionError(f"chunk_size={chunk_size!r}: expected an int of at least 1.")


def _from_logits(logits: Tensor, labels: Tensor, chunk_size: int, average: bool) -> Tensor:
    """[B] of logits [B, T, V], by chunks of rows in float32 at least."""
    batch, length, vocabulary = logits.shape
    targets = F.pad(labels, (0, 1), value=_IGNORED)[:, 1:].to(logits.device)
    wide = torch.promote_types(logits.dtype, torch.float32)
    rows = zip(
        logits.reshape(-1, vocabulary).split(chunk_size),
        targets.reshape(-1).split(chunk_size),
        strict=True,
    )
    losses = [
        F.cross_entropy(chunk.to(wide), wanted, ignore_index=_IGNORED, reduction="none")
        for chunk, wanted in rows
    ]
    sums = -torch.cat(losses).reshape(batch, length).sum(dim=-1)
    return sums / (targets != _IGNORED).sum(dim=-1).clamp(min=1) if average else sums


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode; afterwards each module's own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _adapters_off(model: nn.Module) -> AbstractContextManager[Any]:
    """Without PEFT's adapters, be the model in its wrapper or given adapters by transformers."""
    switch = getattr(model, "disable_adapter", None)
    if callable(switch):
        context: AbstractContextManager[Any] = switch()
        return context
    if getattr(model, "_hf_peft_config_loaded", False):
        return _transformers_adapters_off(model)
    return nullcontext()


@contextmanager
def _transformers_adapters_off(model: Any) -> Iterator[None]:
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()
