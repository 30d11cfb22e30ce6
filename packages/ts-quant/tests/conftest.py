"""Fixtures of ts-quant's tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import ts_quant


@pytest.fixture(params=["nf4", "int8", "fp8", "nvfp4"])
def codec(request: pytest.FixtureRequest) -> str:
    """The formats of different codes and scales; tests/codecs adds the rest."""
    name: str = request.param
    return name


@pytest.fixture
def frozen() -> Callable[..., torch.nn.Linear]:
    """Makes an nn.Linear whose weight is quantized, and decoded for every product."""

    def make(
        n_in: int, n_out: int, codec: str, *, bias: bool = True, dtype: torch.dtype = torch.float32
    ) -> torch.nn.Linear:
        linear = torch.nn.Linear(n_in, n_out, bias=bias, dtype=dtype)
        q = ts_quant.quantize(linear.weight, codec)
        ts_quant.configure_matmul(q, tensor_cores=False)
        linear.weight = torch.nn.Parameter(q, requires_grad=False)
        return linear

    return make


@pytest.fixture
def dense_twin() -> Callable[[torch.nn.Module], torch.nn.Module]:
    """Copies a module and puts the decoded weights in place of the quantized ones."""
    import copy

    def make(module: torch.nn.Module) -> torch.nn.Module:
        twin = copy.deepcopy(module)
        for part in twin.modules():
            for name, parameter in list(part.named_parameters(recurse=False)):
                if isinstance(parameter, ts_quant.QuantTensor):
                    dense: Tensor = parameter.dequantize()
                    setattr(part, name, torch.nn.Parameter(dense, requires_grad=False))
        return twin

    return make
