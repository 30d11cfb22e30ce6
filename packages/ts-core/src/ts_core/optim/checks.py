"""What OffloadAdamW accepts: hyper-parameters, modes, param groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ts_core.errors import NotAvailableError, OptionError

TRAINABLE = (torch.float32, torch.bfloat16, torch.float16)


def group(param_group: dict[str, Any]) -> None:
    """Refuse a param group with values, flags or parameters that cannot be trained."""
    hyper(param_group["lr"], param_group["betas"], param_group["eps"], param_group["weight_decay"])
    for flag in ("amsgrad", "maximize", "differentiable", "capturable"):
        if param_group.get(flag):
            raise OptionError(f"{flag}=True is not supported by OffloadAdamW. Leave it off.")
    for param in param_group["params"]:
        if param.dtype not in TRAINABLE or param.layout is not torch.strided:
            raise OptionError(
                f"a parameter of shape {tuple(param.shape)} has dtype {param.dtype} and "
                f"layout {param.layout}. OffloadAdamW trains dense float32, bfloat16 and "
                f"float16 parameters: convert it or freeze it."
            )


def hyper(lr: Any, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Refuse hyper-parameters out of range."""
    ranges = {
        "lr": float(lr) >= 0.0,
        "eps": eps >= 0.0,
        "weight_decay": weight_decay >= 0.0,
        "betas": len(betas) == 2 and all(0.0 <= beta < 1.0 for beta in betas),
    }
    values = {"lr": lr, "eps": eps, "weight_decay": weight_decay, "betas": betas}
    for name, good in ranges.items():
        if not good:
            expected = "two numbers in [0, 1)" if name == "betas" else "a number of at least 0"
            raise OptionError(f"{name}={values[name]!r} is not accepted. Use {expected}.")


def mode(name: str, moment_dtype: Any) -> None:
    """Refuse modes and moment dtypes that do not exist, or are not built yet."""
    if name in ("gpu", "hybrid", "auto"):
        raise NotAvailableError(f"mode={name!r} is not available in this version. Use mode='cpu'.")
    if name != "cpu":
        raise OptionError(f"mode={name!r} is not accepted. Use 'cpu', 'gpu' or 'hybrid'.")
    if moment_dtype in ("float32", "fp32", torch.float32):
        return
    if moment_dtype in ("bfloat16", "bf16", torch.bfloat16, "int8", "8bit"):
        raise NotAvailableError(
            f"moment_dtype={moment_dtype!r} is not available in this version. Use 'float32'."
        )
    raise OptionError(
        f"moment_dtype={moment_dtype!r} is not accepted. Use 'float32', 'bfloat16' or 'int8'."
    )


def memory(params: Sequence[torch.nn.Parameter]) -> None:
    """Refuse two parameters over the same memory: each would get an update of its own."""
    owners: dict[int, torch.nn.Parameter] = {}
    for param in params:
        if param.numel() == 0:
            continue
        first = owners.setdefault(param.data_ptr(), param)
        if first is not param:
            raise OptionError(
                f"two parameters of shapes {tuple(first.shape)} and {tuple(param.shape)} share "
                f"their memory. To tie weights, use one Parameter in both places "
                f"(b.weight = a.weight, not b.weight.data = a.weight.data)."
            )
