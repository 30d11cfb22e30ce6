"""The same functions in plain PyTorch: the formula, differentiable any number of times.

They build every intermediate (the whole logits included) and are what the tests compare with.
Statistics, softmax and losses are float32, or float64 for float64 inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ts_kernels._adapted_head import LoraAdapter
from ts_kernels._targets import divisor, shifted


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, round_first: bool = True
) -> Tensor:
    """The Llama formula; Gemma's with `offset=1, round_first=False`. See `ts_kernels.rms_norm`."""
    h = _wide(x)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    result_dtype = torch.promote_types(x.dtype, weight.dtype) if round_first else x.dtype
    if offset:
        weight = _wide(weight) + offset
    return (weight * (h.to(x.dtype) if round_first else h)).to(result_dtype)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    round_first: bool = True,
) -> tuple[Tensor, Tensor]:
    """See `ts_kernels.add_rms_norm`."""
    summed = x + residual
    return rms_norm(summed, weight, eps, offset=offset, round_first=round_first), summed


def gated_mlp(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """See `ts_kernels.gated_mlp`."""
    active = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return active * up


def rotary(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    heads_dim: int = 1,
) -> tuple[Tensor, Tensor]:
    """See `ts_kernels.rotary`."""
    cos, sin = (t.unsqueeze(heads_dim - 4) for t in (cos, sin))
    return _rotated(q, cos, sin, interleaved), _rotated(k, cos, sin, interleaved)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    size = cos.shape[-1]
    turning, rest = x[..., :size], x[..., size:]
    if interleaved:
        turned = torch.stack((-turning[..., 1::2], turning[..., ::2]), dim=-1).flatten(-2)
    else:
        turned = torch.cat((-turning[..., size // 2 :], turning[..., : size // 2]), dim=-1)
    out = (turning * cos + turned * sin).to(x.dtype)
    return torch.cat((out, rest), dim=-1) if rest.shape[-1] else out


def lora_linear(
    x: Tensor,
    weight: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    scaling: float = 1.0,
    bias: Tensor | None = None,
) -> Tensor:
    """As PEFT writes it; see `ts_kernels.lora_linear`."""
    result = F.linear(x, weight, bias)
    update = F.linear(F.linear(x.to(lora_a.dtype), lora_a), lora_b) * scaling
    return (result + update).to(result.dtype)


def _token_losses(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    logit_softcap: float | None,
    lora: LoraAdapter | None,
) -> Tensor:
    if lora is None:
        logits = _wide(F.linear(hidden, weight, bias))
    else:
        logits = _wide(lora_linear(hidden, weight, lora.a, lora.b, lora.scaling, bias))
    if logit_softcap is not None:
        logits = logit_softcap * torch.tanh(logits / logit_softcap)
    losses = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        targets.reshape(-1).long(),
        ignore_index=ignore_index,
        reduction="none",
    )
    return losses.reshape(targets.shape)


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    chunk_size: int = 1024,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: int | Tensor | None = None,
    logit_softcap: float | None = None,
    lora: LoraAdapter | None = None,
) -> Tensor:
    """See `ts_kernels.chunked_cross_entropy`; `chunk_size` is accepted and does nothing."""
    losses = _token_losses(hidden, weight, targets, bias, ignore_index, logit_softcap, lora)
    total = losses.sum()
    if num_items is not None:
        return total / divisor(num_items, total.device)
    if reduction == "sum":
        return total
    return total / (targets != ignore_index).sum().clamp(min=1)


def sequence_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    chunk_size: int = 1024,
    ignore_index: int = -100,
    shift: bool = True,
    average: bool = False,
    logit_softcap: float | None = None,
    lora: LoraAdapter | None = None,
) -> Tensor:
    """See `ts_kernels.sequence_logprobs`; `chunk_size` is accepted and does nothing."""
    targets = shifted(labels, ignore_index) if shift else labels
    losses = _token_losses(hidden, weight, targets, bias, ignore_index, logit_softcap, lora)
    sums = -losses.sum(dim=-1)
    return sums / (targets != ignore_index).sum(dim=-1).clamp(min=1) if average else sums


def dpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `ts_kernels.dpo_loss`; in float64, by the probabilities themselves."""
    chosen = beta * (policy_chosen.double() - reference_chosen.double())
    rejected = beta * (policy_rejected.double() - reference_rejected.double())
    right = torch.sigmoid(chosen - rejected)
    losses = -(1 - label_smoothing) * right.log() - label_smoothing * (1 - right).log()
    return losses.sum() / max(losses.numel(), 1), chosen.detach(), rejected.detach()
