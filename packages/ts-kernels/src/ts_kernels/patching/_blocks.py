"""Which modules of a stack of blocks run kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from ts_kernels._backend import KERNEL_DTYPES
from ts_kernels.patching._check import Differs, likeness
from ts_kernels.patching._handle import PatchHandle, Replacement, has_other_forward
from ts_kernels.patching._mlp import mlp_names, replace_mlp
from ts_kernels.patching._norm import looks_like_norm, replace_norm
from ts_kernels.patching._rotary import replace_rotary, rotary_name

Event = Callable[[str], None]
KINDS = ("RMSNorm", "rotary", "gated MLP")


def patch_blocks(
    blocks: Iterable[nn.Module],
    *,
    on_event: Event | None = None,
    device: torch.device | str | None = None,
) -> PatchHandle:
    """Lets RMSNorm, rotary embedding and gated MLP inside these blocks run as kernels.

    Modules are recognized by what they hold, whatever they are called: a norm has one vector and
    an epsilon; a gated MLP has gate_proj, up_proj, down_proj (or w1, w3, w2, or gate_up_proj,
    down_proj); an attention calls a function with "rotary" in its name that takes (q, k, cos,
    sin). Each is compared once with its own code (modules alike in all but their weights' values
    share a comparison), on small random input: in float32 for the formula, and in the model's
    dtype, where results may be 4 units in the last place apart. Weights are not used for that:
    stand-ins of the same sizes take their place, so that weights may be anywhere, in any format.
    Whatever differs, fails or is unknown is left as it is, and `on_event` is told; so it is of
    each of the three that was not found at all.

    Replaced modules look up their weights, projections and epsilon at every call: adapters,
    hooks on projections, quantization and paging work as before. Calls with other arguments than
    one tensor (for rotary: than q, k, cos, sin and unsqueeze_dim) go to the module's own code.
    An attention runs over a copy of its namespace made now: functions that are later replaced in
    the module that defines it are not seen until `undo`.

    Args:
        blocks: modules to look into. Patching does not touch their parameters.
        on_event: called with each event in plain words.
        device: where to compare; None: where the first parameter is.

    Returns:
        A handle: `undo()` gives every module its own code back, `replaced` counts them.

    Example:
        >>> norm = torch.nn.RMSNorm(8, eps=1e-6)
        >>> handle = patch_blocks([norm])
        >>> handle.replaced
        {'RMSNorm': 1}
        >>> handle.undo()
    """
    modules = _distinct(blocks)
    dtype, found = _first_dtype_and_device(modules)
    where = found if device is None else torch.device(device)
    handle, log = PatchHandle(), _Log()
    known: dict[Any, Replacement | Differs] = {}
    with torch.no_grad(), torch.autocast(where.type, enabled=False):
        for module in modules:
            _patch(module, dtype, where, handle, log, known)
    for text in log.lines(handle):
        if on_event is not None:
            on_event(text)
    return handle


def _distinct(blocks: Iterable[nn.Module]) -> list[nn.Module]:
    found = {id(module): module for block in blocks for module in block.modules()}
    return list(found.values())


def _first_dtype_and_device(modules: list[nn.Module]) -> tuple[torch.dtype, torch.device]:
    """Of the first parameter that kernels can run on; else of plain CPU tensors."""
    for module in modules:
        for parameter in module._parameters.values():
            if parameter is not None and parameter.dtype in KERNEL_DTYPES:
                meta = parameter.device.type == "meta"
                return parameter.dtype, torch.device("cpu") if meta else parameter.device
    return torch.float32, torch.device("cpu")


class _Log:
    """Events, one for all modules of a class with the same outcome."""

    def __init__(self) -> None:
        self._replaced: Counter[tuple[str, str]] = Counter()
        self._left: Counter[tuple[str, str]] = Counter()
        self._seen: set[str] = set()

    def replaced(self, replacement: Replacement) -> None:
        self._replaced[replacement.kind, type(replacement.module).__name__] += 1
        self._seen.add(replacement.kind)

    def left(self, module: nn.Module, kind: str, reason: str) -> None:
        self._seen.add(kind)
        self._left[type(module).__name__, reason] += 1

    def lines(self, handle: PatchHandle) -> list[str]:
        found = []
        if self._replaced:
            parts = [f"{kind} in {n} {name}" for (kind, name), n in self._replaced.items()]
            found.append("fused kernels: " + ", ".join(parts))
        for (name, reason), n in self._left.items():
            places = "1 place" if n == 1 else f"{n} places"
            found.append(f"fused kernels: {name} keeps its own code ({places}): {reason}")
        missing = [kind for kind in KINDS if kind not in self._seen]
        if missing:
            found.append(f"fused kernels: nothing known here as {' or '.join(missing)} was found")
        return found


def _patch(
    module: nn.Module,
    dtype: torch.dtype,
    device: torch.device,
    handle: PatchHandle,
    log: _Log,
    known: dict[Any, Replacement | Differs],
) -> None:
    """Replaces the module's forward, or logs why not. `known`: outcomes for modules alike."""
    name = type(module).__name__
    rotary, mlp = rotary_name(module), mlp_names(module)
    replace: Callable[[], Replacement]
    if looks_like_norm(module):
        kind, replace = KINDS[0], partial(replace_norm, module, device)
    elif mlp is not None:
        kind, replace = KINDS[2], partial(replace_mlp, module, mlp, dtype, device)
    elif rotary is not None:
        kind, replace = KINDS[1], partial(replace_rotary, module, rotary, dtype, device)
    else:
        if "RMSNorm" in name or name.endswith("MLP"):
            kind = KINDS[0] if "RMSNorm" in name else KINDS[2]
            log.left(module, kind, "its structure is not one that is known here")
        return
    if has_other_forward(module):
        log.left(module, kind, "its forward has been replaced already")
        return
    key = likeness(module)
    if key not in known:
        try:
            known[key] = replace()
        except Differs as error:
            known[key] = error
    outcome = known[key]
    if isinstance(outcome, Differs):
        log.left(module, kind, str(outcome))
        return
    replacement = outcome if outcome.module is module else outcome.for_module(module)
    handle.install(replacement)
    log.replaced(replacement)
