"""wrap(loader=...): a model on the meta device gets its values while it is being wrapped.

Nothing is read before the run is known to fit. Then each weight is read where it is to stay: frozen
weights one at a time into the codec they are stored in, the weights of a paged block into the
block's image or file, all others straight to the device.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable

import torch
from torch import nn

from ts_core.device import Device
from ts_core.errors import DataError, OptionError
from ts_core.memory.heap import HeapTrimmer
from ts_core.optim import OffloadAdamW
from ts_core.optim.layout import is_sharded
from ts_core.store.leaves import is_wrapper
from ts_core.store.unloaded import can_load, forget_load, give_memory, set_load, values_of


class MetaLoading:
    """Loads what of a model is on the meta device.

    Args:
        model: the model; its parameters on the meta device are marked, until `close`.
        loader: takes the name of a parameter or buffer of `model`, returns its values.
        optimizer: that was passed to wrap().

    Raises:
        OptionError: a tensor that cannot be given its values in place.

    Attributes:
        tensors, size_bytes: of the model that have no values yet.
    """

    def __init__(
        self,
        model: nn.Module,
        loader: Callable[[str], torch.Tensor],
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self._loader = loader
        self._params = [(name, p) for name, p in model.named_parameters() if p.is_meta]
        self._buffers = [(name, b) for name, b in model.named_buffers() if b.is_meta]
        for name, param in self._params:
            _check_can_change(name, param, optimizer)
        everything = [tensor for _, tensor in (*self._params, *self._buffers)]
        self.tensors = len(everything)
        self.size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in everything)
        for name, param in self._params:
            set_load(param, functools.partial(self._read, name, param.shape, param.dtype))

    def fill_adapters(self, model: nn.Module) -> None:
        """Load, in host memory, adapters that are to start at what quantization lost."""
        for module in model.modules():
            if getattr(module, "error_start", None) is not None:
                for param in module.parameters():
                    if param.requires_grad and can_load(param):
                        _fill(param, torch.device("cpu"))

    def fill(self, model: nn.Module, device: Device) -> None:
        """Load what has no values yet, one tensor at a time, on the device."""
        trimmer = HeapTrimmer()
        for param in model.parameters():
            if can_load(param):
                _fill(param, device.torch_device)
                trimmer.read(param.numel() * param.element_size())
        made: dict[int, torch.Tensor] = {}
        names = {id(buffer): name for name, buffer in self._buffers}
        for module in model.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None and id(buffer) in names:
                    if id(buffer) not in made:
                        values = self._read(names[id(buffer)], buffer.shape, buffer.dtype)
                        made[id(buffer)] = _own(values, device.torch_device)
                    module._buffers[key] = made[id(buffer)]

    def close(self) -> None:
        """Parameters without values are ordinary ones on the meta device again."""
        for _, param in self._params:
            forget_load(param)

    def _read(self, name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        try:
            found = self._loader(name)
        except LookupError as error:
            raise DataError(
                f"loader({name!r}) has no values: {type(error).__name__}: {error}. It is called "
                f"with the names of model.named_parameters() and model.named_buffers()."
            ) from error
        if not isinstance(found, torch.Tensor) or found.is_meta or is_wrapper(found):
            what = type(found).__name__
            if isinstance(found, torch.Tensor) and found.is_meta:
                what = "tensor on the meta device"
            raise DataError(
                f"loader({name!r}) returned a {what}. Return a plain tensor with the values "
                f"(quantize= of wrap() stores it in a codec)."
            )
        if found.shape != shape:
            raise DataError(
                f"loader({name!r}) returned shape {tuple(found.shape)}, where the model has "
                f"{tuple(shape)}."
            )
        if found.dtype.is_floating_point != dtype.is_floating_point:
            raise DataError(
                f"loader({name!r}) returned {found.dtype} values, where the model has {dtype}."
            )
        return found.detach().to(dtype)


def meta_tensors(model: nn.Module) -> list[str]:
    """Names of the parameters and buffers that have no values."""
    named = (*model.named_parameters(), *model.named_buffers())
    return [name for name, tensor in named if tensor.is_meta]


def _fill(param: nn.Parameter, device: torch.device) -> None:
    give_memory(param, _own(values_of(param), device))


def _own(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`values` on the device in memory of their own: training must not write into the caller's."""
    if values.device == device:
        return values.clone(memory_format=torch.contiguous_format)
    return values.to(device).contiguous()


def _check_can_change(
    name: str, param: nn.Parameter, optimizer: torch.optim.Optimizer | None
) -> None:
    why = ""
    if is_wrapper(param) or is_sharded(param):
        why = f"is a {type(param.data).__name__}, not a plain tensor"
    elif isinstance(optimizer, OffloadAdamW) and any(
        param is other for group in optimizer.param_groups for other in group["params"]
    ):
        why = "belongs to an OffloadAdamW already: pass torch.optim.AdamW, or None and lr="
    elif param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
        why = "has hooks, which would be lost: register them after wrap()"
    elif weakref.getweakrefs(param):
        why = "is watched through weak references: make what watches it after wrap()"
    if why:
        raise OptionError(f"{name} is on the meta device and {why}.")
