"""torch.compile traces through a quantized linear, with no full-precision copy saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

MakeLinear = Callable[..., nn.Linear]


class Net(nn.Module):
    def __init__(self, frozen: MakeLinear, codec: str) -> None:
        super().__init__()
        self.base = frozen(48, 64, codec)
        self.side = nn.Linear(48, 64, bias=False)
        self.out = frozen(64, 48, codec, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(nn.functional.silu(self.base(x) + self.side(x)))


def results(net: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    net.zero_grad()
    leaf = x.clone().requires_grad_()
    y = call(leaf)
    y.square().sum().backward()
    grads = [p.grad for p in net.parameters() if p.requires_grad]
    assert leaf.grad is not None and all(grad is not None for grad in grads)
    return [y.detach(), leaf.grad, *(grad.clone() for grad in grads if grad is not None)]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def test_one_graph_and_the_same_numbers(frozen: MakeLinear, codec: str) -> None:
    net = Net(frozen, codec)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 5, 48)
    for a, b in zip(results(net, compiled, x), results(net, net, x), strict=True):
        assert torch.equal(a, b)
    with torch.no_grad():
        net.base.weight.copy_(torch.randn(64, 48))
    net.out.weight.codes = net.out.weight.codes.flip(0)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for a, b in zip(results(net, compiled, x), results(net, net, x), strict=True):
            assert torch.equal(a, b)


def test_no_full_precision_weight_is_saved(frozen: MakeLinear, codec: str) -> None:
    saved: list[Any] = []

    def forward_compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        (output,) = graph.graph.find_nodes(op="output")
        saved.extend(node.meta["val"] for node in output.args[0] if node is not None)
        return make_boxed_func(graph.forward)

    def backward_compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=forward_compiler,
        bw_compiler=backward_compiler,
        partition_fn=min_cut_rematerialization_partition,
    )
    net = Net(frozen, codec)
    compiled = torch.compile(net, fullgraph=True, backend=backend)
    x = torch.randn(2, 5, 48)
    for a, b in zip(results(net, compiled, x), results(net, net, x), strict=True):
        assert torch.equal(a, b)
    weight_sized = [v for v in saved if v.numel() == 48 * 64 and v.dtype is torch.float32]
    assert len(weight_sized) == 1  # `side`, an ordinary weight; the two frozen ones are codes
    code_size = 48 * 64 // (1 if codec in ("int8", "fp8") else 2)
    codes = [v for v in saved if v.element_size() == 1 and v.numel() == code_size]
    assert len(codes) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # advice on a GPU
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_inductor(frozen: MakeLinear, codec: str, device: str) -> None:
    net = Net(frozen, codec).to(device)
    compiled = torch.compile(net, fullgraph=True)
    x = torch.randn(2, 5, 48, device=device)
    for a, b in zip(results(net, compiled, x), results(net, net, x), strict=True):
        torch.testing.assert_close(a, b)
