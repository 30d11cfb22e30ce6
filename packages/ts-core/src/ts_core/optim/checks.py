"""What OffloadAdamW accepts: hyper-parameters, modes, param groups."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch

from ts_core.errors import OptionError
from ts_core.optim.layout import is_sharded, local
from ts_core.option_names import hint_for_optimizer

TRAINABLE = (torch.float32, torch.bfloat16, torch.float16)
# What torch.optim.AdamW takes beside the plain update; "fused" and "foreach" only say how it runs.
UNLIKE_PLAIN = ("amsgrad", "maximize", "differentiable", "capturable")


def known(optimizer: type, unknown: dict[str, Any]) -> None:
    """Refuse keywords that the optimizer does not have, with the nearest that it has."""
    for name in unknown:
        parameters = inspect.signature(optimizer).parameters.values()
        options = [option.name for option in parameters if option.kind is not option.VAR_KEYWORD]
        raise OptionError(
            f"{optimizer.__name__} has no option {name!r}.{hint_for_optimizer(name, options)}"
        )


def torch_flags(**flags: Any) -> None:
    """Refuse keywords of torch.optim.AdamW that ask for more than its plain update."""
    for flag, value in flags.items():
        if value:
            raise OptionError(
                f"{flag}={value!r} is not supported by OffloadAdamW, which computes the plain "
                f"AdamW update in its own way. Leave it off."
            )


def group(param_group: dict[str, Any]) -> None:
    """Refuse a param group with values, flags or parameters that cannot be trained."""
    hyper(param_group["lr"], param_group["betas"], param_group["eps"], param_group["weight_decay"])
    torch_flags(**{flag: param_group.get(flag) for flag in UNLIKE_PLAIN})
    for param in param_group["params"]:
        plain = is_sharded(param) or param.layout is torch.strided
        if param.dtype not in TRAINABLE or not plain:
            raise OptionError(
                f"a parameter of shape {tuple(param.shape)} has dtype {param.dtype} and "
                f"layout {param.layout}. OffloadAdamW trains dense float32, bfloat16 and "
                f"float16 parameters: convert it or freeze it."
            )


def hyper(lr: Any, betas: Any, eps: Any, weight_decay: Any) -> None:
    """Refuse hyper-parameters that are no numbers, or out of range."""
    pair = isinstance(betas, tuple | list) and len(betas) == 2
    good = {
        "lr": _within(lr, math.inf),
        "eps": _within(eps, math.inf),
        "weight_decay": _within(weight_decay, math.inf),
        "betas": pair and all(_within(beta, 1.0) for beta in betas),
    }
    values = {"lr": lr, "eps": eps, "weight_decay": weight_decay, "betas": betas}
    for name, accepted in good.items():
        if not accepted:
            expected = (
                "two numbers in [0, 1)" if name == "betas" else "a finite number of at least 0"
            )
            raise OptionError(f"{name}={values[name]!r} is not accepted. Use {expected}.")


def _within(value: Any, end: float) -> bool:
    """Whether it is a number (of Python, numpy or in a tensor of one) from 0 to below `end`."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and 0.0 <= float(value) < end
    return isinstance(value, Real) and not isinstance(value, bool) and 0.0 <= float(value) < end


def moment_kind(moment_dtype: Any) -> str:
    """ "float32", "bfloat16" or "int8" for any accepted spelling."""
    spellings: dict[Any, str] = {
        "float32": "float32",
        "fp32": "float32",
        torch.float32: "float32",
        "bfloat16": "bfloat16",
        "bf16": "bfloat16",
        torch.bfloat16: "bfloat16",
        "int8": "int8",
        "8bit": "int8",
        torch.int8: "int8",
    }
    try:
        return spellings[moment_dtype]
    except (KeyError, TypeError):
        raise OptionError(
            f"moment_dtype={moment_dtype!r} is not accepted. Use 'float32', 'bfloat16' or 'int8'."
        ) from None


def mode(name: str, kind: str, pin_moments: Any) -> None:
    """Refuse modes that do not exist, and combinations that cannot be."""
    if name not in ("cpu", "gpu", "hybrid", "auto"):
        raise OptionError(f"mode={name!r} is not accepted. Use 'cpu', 'gpu', 'hybrid' or 'auto'.")
    if name in ("gpu", "hybrid") and kind != "float32":
        raise OptionError(
            f"mode={name!r} keeps fp32 moments, {kind} ones are kept by host threads only. Use "
            f"mode='cpu' with moment_dtype={kind!r}, or moment_dtype='float32'."
        )
    if pin_moments not in (None, True, False):
        raise OptionError(f"pin_moments={pin_moments!r} is not accepted. Use None, True or False.")
    if name == "gpu" and pin_moments is False:
        raise OptionError(
            "mode='gpu' reads moments from pinned memory. Use pin_moments=None or True, or another "
            "mode."
        )


def numbers(max_grad_norm: Any, chunk_elems: Any, threads: Any, seed: Any) -> None:
    """Refuse numbers out of range."""
    number = isinstance(max_grad_norm, Real) and not isinstance(max_grad_norm, bool)
    if max_grad_norm is not None and not (number and float(max_grad_norm) > 0):
        raise OptionError(
            f"max_grad_norm={max_grad_norm!r} is not accepted. Use a number above 0, or None."
        )
    if isinstance(chunk_elems, bool) or not isinstance(chunk_elems, int) or chunk_elems < 1024:
        raise OptionError(
            f"chunk_elems={chunk_elems!r} is not accepted. Use an integer of at least 1024."
        )
    if chunk_elems % 256:
        raise OptionError(f"chunk_elems={chunk_elems!r} is not accepted. Use a multiple of 256.")
    if threads is not None and (
        isinstance(threads, bool) or not isinstance(threads, int) or threads < 0
    ):
        raise OptionError(f"threads={threads!r} is not accepted. Use None or a number of threads.")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 32:
        raise OptionError(f"seed={seed!r} is not accepted. Use an integer from 0 to 2**32 - 1.")


def flags(**given: Any) -> None:
    """Refuse what is neither True nor False."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise OptionError(f"{name}={value!r} is not accepted. Use True or False.")


def eager(value: bool | None, needs_norm: bool) -> None:
    """Refuse updates during backward where the whole gradient is needed first."""
    if value is not None and not isinstance(value, bool):
        raise OptionError(f"eager={value!r} is not accepted. Use None, True or False.")
    if value and needs_norm:
        raise OptionError(
            "eager=True starts updates before the whole gradient is known, which max_grad_norm, "
            "compute_grad_norm and skip_nonfinite need. Use eager=None or False with them."
        )


def memory(params: Sequence[torch.nn.Parameter]) -> None:
    """Refuse two parameters over the same memory: each would get an update of its own."""
    ranges = []
    for param in {id(param): param for param in params}.values():
        here = local(param.detach())
        if here.numel() > 0 and not here.is_meta:
            span = sum((n - 1) * abs(s) for n, s in zip(here.shape, here.stride(), strict=True)) + 1
            start = here.data_ptr()
            ranges.append((start, start + span * here.element_size(), param))
    ranges.sort(key=lambda found: found[:2])
    for (_, end, first), (start, _, param) in itertools.pairwise(ranges):
        if start < end:
            raise OptionError(
                f"two parameters of shapes {tuple(first.shape)} and {tuple(param.shape)} share "
                f"their memory. To tie weights, use one Parameter in both places "
                f"(b.weight = a.weight, not b.weight.data = a.weight.data)."
            )
