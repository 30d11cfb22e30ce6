"""Fixtures shared by the tests of ts-kernels."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed_and_threads():
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def llama(x, weight, eps):
    """The formula as the Llama modelling code writes it."""
    input_dtype = x.dtype
    hidden_states = x.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + eps)
    return weight * hidden_states.to(input_dtype)


@pytest.fixture
def llama_formula():
    return llama


class SixBit(torch.Tensor):
    """A stand-in for a quantized weight: int8 codes and a scale, multiplied by `F.linear` only.

    It speaks the traceable-wrapper protocol, decodes in forward and again in backward, and any
    operation that would need a dense copy of it raises.
    """

    @staticmethod
    def __new__(cls, codes, scale, dtype):
        return torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=dtype, device=codes.device
        )

    def __init__(self, codes, scale, dtype):
        self.codes = codes
        self.scale = scale
        self.decoded = 0

    @classmethod
    def encode(cls, weight):
        scale = weight.abs().max() / 31
        return cls((weight / scale).round().to(torch.int8), scale, weight.dtype)

    def dense(self):
        self.decoded += 1
        return (self.codes * self.scale).to(self.dtype)

    def __tensor_flatten__(self):
        return ["codes", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner, meta, outer_size, outer_stride):
        return SixBit(inner["codes"], inner["scale"], meta)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.linear:
            return _SixBitLinear.apply(*args, *(kwargs or {}).values())
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale, args[0].dtype)
        raise AssertionError(f"{func} was called on a quantized weight")


class _SixBitLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias=None):
        ctx.weight = weight
        return torch.nn.functional.linear(x, weight.dense(), bias)

    @staticmethod
    def backward(ctx, grad):
        bias_grad = grad.sum(0) if ctx.needs_input_grad[2] else None
        return grad @ ctx.weight.dense(), None, bias_grad


@pytest.fixture
def quantized():
    """Encodes a weight as a tensor subclass that only `F.linear` may use."""
    return SixBit.encode
