"""Weights of decoder layers in files while a model is loaded: load_model(disk_offload=...)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from ts_core.disk import DiskFolder
from ts_core.store.leaves import is_wrapper, tensor_leaves
from ts_hf.families import find_decoder_layers
from ts_hf.sizes import format_bytes


class LayerFiles:
    """Moves the weights of decoder layers into memory-mapped files, one file per plain tensor.

    A file's name is removed once it is mapped, so nothing is left behind however the process ends;
    its bytes go when the tensor does. Mapped bytes are page cache: the system drops them when RAM
    is short, and reads them again.

    Args:
        model: the skeleton that is being filled.
        directory: on a local disk, with room for the layers.

    Raises:
        OptionError: the directory cannot be used.
    """

    def __init__(self, model: nn.Module, directory: str | Path) -> None:
        self._folder = DiskFolder(directory)
        self._directory = directory
        self._count = 0
        self.size_bytes = 0
        """Bytes written so far."""
        inside = {id(module) for layer in find_decoder_layers(model) for module in layer.modules()}
        self._names = {
            f"{path}.{name}"
            for path, module in model.named_modules()
            if id(module) in inside
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.dim() >= 2
        }

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        """`tensor`, its bytes in a file if `name` is a matrix of a decoder layer.

        Raises:
            OutOfBudgetError: the disk is full.
            DataError: the disk cannot be written to.
        """
        if name not in self._names or tensor.numel() == 0:
            return tensor
        if not is_wrapper(tensor):
            return self._mapped(tensor)
        for leaf in tensor_leaves(name, tensor):
            leaf.set(self._mapped(leaf.get()))
        return tensor

    def close(self, say: Callable[[str], None]) -> None:
        """Remove the folder (mapped tensors stay) and say what was written."""
        say(f"disk_offload: {format_bytes(self.size_bytes)} of layers in {self._directory}")
        self._folder.close()

    def _mapped(self, tensor: Tensor) -> Tensor:
        plain = tensor.detach().contiguous()
        flat = plain.view(-1).view(torch.uint8)
        file = self._folder.write(f"weight-{self._count:06d}.bin", [flat], flat.numel())
        self._count += 1
        self.size_bytes += flat.numel()
        # Mapped anew: this mapping keeps no file descriptor, of which a process has few.
        mapped = torch.from_file(str(file.path), shared=True, size=flat.numel(), dtype=torch.uint8)
        file.remove()
        return mapped.view(plain.dtype).view(plain.shape)
