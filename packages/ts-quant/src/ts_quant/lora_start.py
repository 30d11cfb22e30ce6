"""Start LoRA adapters at what quantization lost, at the right scale.

A LoRA layer computes W x + scaling * B A x, with scaling = alpha / r (or alpha / sqrt(r)). For the
product to be the fit of the error, `scaling * B A = b a`; so both factors are divided by
sqrt(scaling), whatever r and alpha are.

The factors live at the linear layer (`linear.error_start`), not at its weight, so that moving or
replacing the weight keeps them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ts_quant.errors import OptionError

ATTRIBUTE = "error_start"
"""Name of the attribute of a linear layer that holds its `ErrorStart`."""


@dataclass
class ErrorStart:
    """The rank-r fit b @ a of what quantizing a weight lost, largest direction first.

    Attributes:
        b: [out, r] on the CPU.
        a: [r, in] on the CPU.
        started: the adapter that starts here and its rank, once `init_lora_from_error` ran.
        rounds: of the alternation that the stored weight comes from; after more than one it is
            further from the original than plain quantization unless an adapter starts here.
    """

    b: Tensor
    a: Tensor
    started: tuple[str, int] | None = None
    rounds: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of the two factors."""
        return self.b.numel() * self.b.element_size() + self.a.numel() * self.a.element_size()

    def init_lora(self, model: nn.Module, *, overwrite: bool = True) -> int:
        """`init_lora_from_error(model)`, for callers that only know this object."""
        return init_lora_from_error(model, overwrite=overwrite)

    def started_delta(self) -> Tensor | None:
        """fp32 [out, in]: what the adapter added when it started; None if none started here."""
        return None if self.started is None else self.delta(self.started[1])

    def delta(self, rank: int) -> Tensor:
        """fp32 [out, in]: what an adapter of that rank adds when it starts here."""
        return self.b[:, :rank].float() @ self.a[:rank].float()


def init_lora_from_error(model: nn.Module, *, overwrite: bool = True) -> int:
    """Let the PEFT LoRA adapters on quantized weights start at what quantization lost.

    Call it after `get_peft_model` and before training; it overwrites A and B of each adapted layer
    that holds factors (`quantize_model` or `load_model` with `error_rank`). An adapter of a lower
    rank takes the largest directions; in one of a higher rank the other rows keep the random A
    and zero B that PEFT gave them.

    Args:
        model: a PEFT model. Changed in place.
        overwrite: whether adapters that were trained or started already (B is not zero) are
            started anew.

    Returns:
        How many layers were started. 0 when no layer holds factors.

    Raises:
        OptionError: a layer with factors has several active adapters (only one may hold the
            error's fit), or an adapter whose product is not B A (DoRA).
    """
    count = 0
    for name, module, start in _adapted(model):
        adapter = _only_adapter(name, module)
        lora_a, lora_b = module.lora_A[adapter].weight, module.lora_B[adapter].weight
        if not overwrite and bool(lora_b.detach().any()):
            continue
        scaling = float(module.scaling[adapter])
        if scaling <= 0:
            raise OptionError(
                f"{name}: adapter {adapter!r} has scaling {scaling}; expected lora_alpha above 0"
            )
        rank = min(start.a.shape[0], lora_a.shape[0])
        with torch.no_grad():
            root = scaling**0.5
            lora_a[:rank].copy_(start.a[:rank].float() / root)
            lora_b[:, :rank].copy_(start.b[:, :rank].float() / root)
            lora_b[:, rank:].zero_()
        start.started = (adapter, rank)
        count += 1
    return count


def _adapted(model: nn.Module) -> Iterator[tuple[str, Any, ErrorStart]]:
    """Every LoRA layer (by its shape, not its class) whose base layer holds factors."""
    for name, module in model.named_modules():
        base = getattr(module, "base_layer", None)
        start = getattr(base, ATTRIBUTE, None)
        if isinstance(start, ErrorStart) and hasattr(module, "lora_A"):
            yield name, module, start


def _only_adapter(name: str, module: Any) -> str:
    active = [key for key in module.active_adapters if key in module.lora_A]
    if len(active) != 1:
        raise OptionError(
            f"{name} has {len(active)} active adapters ({', '.join(active) or 'none'}): exactly "
            f"one can start at the quantization error. Activate one with set_adapter first."
        )
    adapter = str(active[0])
    if getattr(module, "use_dora", {}).get(adapter):
        raise OptionError(
            f"{name}: adapter {adapter!r} uses DoRA, which rescales the sum, so it cannot start "
            f"at the quantization error. Use use_dora=False or error_rank=0."
        )
    return adapter
