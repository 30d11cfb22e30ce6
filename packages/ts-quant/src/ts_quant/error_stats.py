"""What a model's activations look like: E[x^2] per input channel of each linear layer.

An error in column j of a weight is multiplied by x_j, so what quantization loses matters as much
as E[x_j^2] says. A little data is enough. The blocks run one after the other, each over all
batches, so that one block at a time needs to be on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ts_quant.errors import OptionError, QuantError


class _Stop(Exception):
    """Ends a forward pass at the first block."""


def error_stats(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    blocks: Sequence[nn.Module],
    device: torch.device | str | None = None,
) -> dict[str, Tensor]:
    """Collect E[x^2] per input channel of every nn.Linear in the blocks.

    The model is evaluated (no dropout) without gradients. What lies before the first block runs
    where it is; then each block is moved to `device`, run over every batch, and moved back. The
    blocks must be called in order, each on the output of the one before (as decoder layers are).
    Hidden states of all batches are kept on the CPU meanwhile.

    Args:
        model: the model, its weights quantized or not.
        batches: what the model is called with: dicts of keyword arguments, tuples of arguments or
            single tensors. A few thousand tokens suffice.
        blocks: the layer stack.
        device: where each block runs; None leaves the blocks where they are.

    Returns:
        fp32 [in_features] on the CPU, by the linear layer's name in the model; ones for a layer
        that no data reached (an expert never picked), which weighs its channels the same.

    Raises:
        OptionError: no blocks, no batches, or blocks the model does not call in this order.
        QuantError: a block does not map a hidden state to the next one.
    """
    stack = list(blocks)
    if not stack:
        raise OptionError("error_stats needs the model's blocks, and got none")
    names = {id(module): name for name, module in model.named_modules()}
    if any(id(block) not in names for block in stack):
        raise OptionError("error_stats: blocks must be modules of the model")
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            waiting = _first_inputs(model, batches, stack)
            found: dict[str, Tensor] = {}
            for index, block in enumerate(stack):
                found.update(_run_block(block, names, waiting, index, device))
    finally:
        model.train(was_training)
    return found


@dataclass
class _Batch:
    """One batch on its way through the blocks, on the CPU.

    Attributes:
        hidden: the hidden state that enters the next block.
        calls: the other arguments of each block: (positional, keywords).
    """

    hidden: Tensor
    calls: list[tuple[Any, Any]]


def _first_inputs(model: nn.Module, batches: Iterable[Any], stack: list[nn.Module]) -> list[_Batch]:
    """What the blocks are called with, from passes in which each block does nothing."""
    found: list[_Batch] = []
    for batch in batches:
        seen = _Recorder(stack)
        try:
            _call(model, batch)
        except _Stop:
            pass
        finally:
            seen.remove()
        if len(seen.calls) != len(stack) or seen.hidden is None:
            raise OptionError(
                f"error_stats: the model called {len(seen.calls)} of its {len(stack)} blocks, or "
                f"not in their order, so they cannot be run one by one"
            )
        found.append(_Batch(seen.hidden, seen.calls))
    if not found:
        raise OptionError("error_stats needs at least one batch, and got none")
    return found


class _Recorder:
    """Puts stubs in the blocks' places that note their arguments; the last one ends the pass."""

    def __init__(self, stack: list[nn.Module]) -> None:
        self.hidden: Tensor | None = None
        self.calls: list[tuple[Any, Any]] = []
        self._stack = stack
        self._own = [block.__dict__.get("forward") for block in stack]
        # With the originals: the id of one that is gone may be another one's.
        self._on_cpu: dict[int, tuple[Tensor, Tensor]] = {}
        for index, block in enumerate(stack):
            block.forward = partial(self._stub, index)

    def _stub(self, index: int, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs.pop("hidden_states", None)
        if not isinstance(hidden, Tensor):
            raise OptionError(
                f"error_stats: block {index} ({type(self._stack[index]).__name__}) is not called "
                f"with a tensor first, so the blocks cannot be run one by one"
            )
        if index != len(self.calls):
            raise _Stop
        for cache in ("past_key_values", "past_key_value"):
            kwargs.pop(cache, None)
        if "use_cache" in kwargs:
            kwargs["use_cache"] = False
        if index == 0:
            self.hidden = hidden.cpu()
        self.calls.append((tree_map(self._keep, args[1:]), tree_map(self._keep, kwargs)))
        if len(self.calls) == len(self._stack):
            raise _Stop
        return hidden

    def _keep(self, value: Any) -> Any:
        """Tensors on the CPU, one copy of those that every block is given."""
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._on_cpu:
            self._on_cpu[id(value)] = value, value.cpu()
        return self._on_cpu[id(value)][1]

    def remove(self) -> None:
        for block, own in zip(self._stack, self._own, strict=True):
            if own is None:
                del block.forward
            else:
                block.forward = own


def _run_block(
    block: nn.Module,
    names: dict[int, str],
    batches: list[_Batch],
    index: int,
    device: torch.device | str | None,
) -> dict[str, Tensor]:
    meter = _Meter(block, names)
    home = next((p.device for p in block.parameters()), torch.device("cpu"))
    place = torch.device(device) if device is not None else home
    if place != home:
        block.to(place)
    try:
        for batch in batches:
            args, kwargs = _to(batch.calls[index], place)
            result = block(batch.hidden.to(place), *args, **kwargs)
            result = result[0] if isinstance(result, tuple) else result
            if not isinstance(result, Tensor) or result.shape != batch.hidden.shape:
                raise QuantError(
                    f"error_stats: block {names[id(block)]!r} does not map a hidden state to the "
                    f"next one, so the blocks cannot be run one by one"
                )
            batch.hidden = result.cpu()
    finally:
        meter.remove()
        if place != home:
            block.to(home)
    return meter.means()


class _Meter:
    """Sums of squares of the inputs of each linear layer of a block."""

    def __init__(self, block: nn.Module, names: dict[int, str]) -> None:
        self._sums: dict[str, Tensor] = {}
        self._rows: dict[str, int] = {}
        linears = [module for module in block.modules() if isinstance(module, nn.Linear)]
        self._widths = {names[id(module)]: module.in_features for module in linears}
        self._handles = [
            module.register_forward_pre_hook(self._hook(names[id(module)]), with_kwargs=True)
            for module in linears
        ]

    def _hook(self, name: str) -> Any:
        def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = (args[0] if args else kwargs["input"]).detach()
            x = x.flatten(0, -2) if x.dim() > 1 else x[None]
            squares = x.float().square().sum(dim=0)
            known = self._sums.get(name)
            self._sums[name] = squares if known is None else known.add_(squares)
            self._rows[name] = self._rows.get(name, 0) + x.shape[0]

        return add

    def means(self) -> dict[str, Tensor]:
        """E[x^2] of each layer; ones where no data passed, which weighs all channels the same."""
        return {
            name: (self._sums[name] / max(self._rows[name], 1)).cpu()
            if name in self._sums
            else torch.ones(width, dtype=torch.float32, device="cpu")
            for name, width in self._widths.items()
        }

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _call(model: nn.Module, batch: Any) -> None:
    if isinstance(batch, dict) or hasattr(batch, "keys"):
        model(**{key: batch[key] for key in batch.keys()})
    elif isinstance(batch, tuple | list):
        model(*batch)
    else:
        model(batch)


def _to(value: Any, place: torch.device | str) -> Any:
    return tree_map(lambda item: item.to(place) if isinstance(item, Tensor) else item, value)
