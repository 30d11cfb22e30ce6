"""FP8 products on a CUDA GPU: the kernels around them, the layer, CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ts_quant
from ts_quant.matmul import dispatch, fp8, options
from ts_quant.matmul.rows import fp8_groups, fp8_rows, groups_reference, rows_reference

pytestmark = pytest.mark.gpu

LAYOUTS = [None, "row", "tile"]


@pytest.fixture(autouse=True)
def _small_matrices_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "FASTER_FROM", 0)


def has_fp8() -> bool:
    return torch.cuda.get_device_capability() >= (8, 9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("m", "k"), [(1, 16), (7, 384), (33, 4224), (5, 13824)])
def test_activations_are_quantized_as_on_a_cpu(m: int, k: int, dtype: torch.dtype) -> None:
    if not has_fp8():
        pytest.skip("converting to e4m3 needs sm_89")
    x = (torch.randn(m, k) * torch.logspace(-3, 3, m)[:, None]).to(dtype)
    x[m // 2] = 0
    for quantize, reference in ((fp8_rows, rows_reference), (fp8_groups, groups_reference)):
        if quantize is fp8_groups and k % 128:
            continue
        for part in (x.cuda(), x.cuda().t().contiguous().t()):
            for mine, expected in zip(quantize(part), reference(x), strict=True):
                assert torch.equal(mine.cpu(), expected)
    x[0, 3] = float("nan")
    codes = fp8_rows(x.cuda())[0].view(torch.float8_e4m3fn).float()
    assert bool(codes[0].isnan().any()) and not bool(codes[1:].isnan().any())


@pytest.mark.parametrize("k", [32, 192, 5120])
def test_blocks_of_32_to_rows_as_on_a_cpu(k: int) -> None:
    if not has_fp8():
        pytest.skip("converting to e4m3 needs sm_89")
    spread = torch.logspace(-3, 3, 16 * k // 32).view(16, -1).repeat_interleave(32, 1)
    here = ts_quant.quantize(torch.randn(16, k) * spread, "fp8")
    codes, scale = fp8.blocks_to_rows(*here.to("cuda").buffers(), 16, k)
    expected, expected_scale = fp8.blocks_to_rows(*here.buffers(), 16, k)
    assert torch.equal(codes.view(torch.uint8).cpu(), expected.view(torch.uint8))
    assert torch.equal(scale.cpu(), expected_scale)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [4, 17, 512])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_layer(layout: str | None, tokens: int, bias: bool) -> None:
    w = (torch.randn(512, 1024, device="cuda") * 0.05).bfloat16()
    q = ts_quant.quantize(w, "fp8", layout=layout)
    x = torch.randn(tokens, 1024, device="cuda").bfloat16().requires_grad_()
    b = torch.randn(512, device="cuda").bfloat16() if bias else None
    y = torch.nn.functional.linear(x, q, b)
    dense = q.dequantize()
    grad = torch.randn_like(y)
    (grad_x,) = torch.autograd.grad(y, x, grad)
    assert torch.equal(grad_x, grad @ dense)
    x, y = x.detach(), y.detach()
    kind = fp8.activation_kind(q.spec, q.shape, tokens)
    plain = torch.nn.functional.linear(x, dense, b)
    if kind is None or not fp8.supported(x.device, fp8.needed(kind, 1024)):
        assert torch.equal(y, plain)
        return
    quantized = (fp8_rows if kind == fp8.ROWS else fp8_groups)(x)
    blocks, grouped = q.spec.scales == "e8m0", kind == fp8.GROUPS
    expected = fp8.linear_reference(*quantized, *q.buffers(), blocks, grouped, b)
    # The tensor cores of sm_90 keep about 14 bits of a partial sum.
    size = expected.float().abs().mean()
    assert float((y.float() - expected.float()).abs().mean()) <= 2.0**-8 * float(size)
    assert float((y.float() - plain.float()).norm() / plain.float().norm()) < 0.04
    if not bias:
        assert not torch.equal(y, plain)


@pytest.mark.parametrize("size", [512, 4096])  # fewer and more weights than FASTER_FROM
@pytest.mark.parametrize("outliers", [0, 16])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_layer_as_emulated_on_a_cpu(
    layout: str | None, outliers: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    w = (torch.randn(size, 768) * 0.05).bfloat16()
    channels = list(range(7, 768, 48))[:outliers] or None
    here = ts_quant.quantize(w, "fp8", layout=layout, outlier_channels=channels)
    x = torch.randn(16, 768).bfloat16()
    if channels:
        x[:, channels] *= 20
    b = torch.randn(size).bfloat16()
    there = here.to("cuda")
    kind = fp8.activation_kind(here.spec, here.shape, 16)
    assert kind is not None
    device = torch.device("cuda", torch.cuda.current_device())
    if not fp8.supported(device, fp8.needed(kind, 768)):
        pytest.skip("this GPU or build of torch has no such product")
    decoded = torch.nn.functional.linear(x.cuda(), there.dequantize(), b.cuda())
    for forced in (False, True):
        for q in (here, there):
            ts_quant.configure_matmul(q, tensor_cores=True if forced else "auto")
        y = torch.nn.functional.linear(x.cuda(), there, b.cuda())
        if size == 512 and not forced:
            assert torch.equal(y, decoded)
            continue
        assert not torch.equal(y, decoded)
        with ts_quant.emulate_tensor_cores():
            expected = torch.nn.functional.linear(x, here, b).float()
        # The tensor cores of sm_90 keep about 14 bits of a partial sum.
        assert float((y.cpu().float() - expected).norm()) <= 2.0**-7 * float(expected.norm())


@pytest.mark.parametrize(("tokens", "k"), [(8, 384), (64, 384), (8, 512), (64, 1408)])
def test_the_grouped_product_with_and_without_padded_scales(tokens: int, k: int) -> None:
    """Each shape on its own, so that a failure says which one cuBLASLt does not take."""
    device = torch.device("cuda", torch.cuda.current_device())
    if not fp8.supported(device, fp8.needed(fp8.GROUPS, k)):
        pytest.skip(f"no product for {fp8.needed(fp8.GROUPS, k)} here: such weights are decoded")
    q = ts_quant.quantize(torch.randn(256, k, device="cuda").bfloat16(), "fp8", layout="tile")
    x = torch.randn(tokens, k, device="cuda").bfloat16()
    arguments = (*fp8_groups(x), *q.buffers(), False, True, None)
    y = torch.ops.ts_quant.fp8_linear(*arguments)
    expected = fp8.linear_reference(*arguments)
    assert y.is_contiguous() and y.shape == expected.shape and y.dtype is expected.dtype
    assert torch.equal(y, torch.ops.ts_quant.fp8_linear(*arguments))
    size = expected.float().abs().mean()
    assert float((y.float() - expected.float()).abs().mean()) <= 2.0**-8 * float(size)


@pytest.mark.parametrize("layout", [None, "row"], ids=str)
def test_q_k_and_v_in_a_cuda_graph(layout: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [
        ts_quant.quantize(torch.randn(256, 512, device="cuda").bfloat16(), "fp8", layout=layout)
        for _ in range(2)
    ]
    w = torch.randn(256, 512, device="cuda").bfloat16()
    weights.append(ts_quant.quantize(w, "fp8", layout=layout, outlier_channels=[1, 100, 511]))
    x = torch.randn(32, 512, device="cuda").bfloat16()
    calls: list[int] = []
    real = dispatch.fp8_rows

    def counted(rows: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return real(rows)

    monkeypatch.setattr(dispatch, "fp8_rows", counted)

    def step() -> list[Tensor]:
        return [torch.nn.functional.linear(x, q) for q in weights]

    step()
    if not calls:
        pytest.skip("this GPU or build of torch has no FP8 product")
    assert len(calls) == 1
    graphs, results = [], []
    for _ in range(2):  # the second capture must not read what the first one quantized
        calls.clear()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append(step())
        assert len(calls) == 1
        graphs.append(graph)
    x.copy_(torch.randn_like(x))
    expected = step()
    for graph, ys in zip(reversed(graphs), reversed(results), strict=True):
        graph.replay()
        for y, wanted in zip(ys, expected, strict=True):
            assert torch.equal(y, wanted)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_inductor(layout: str | None) -> None:
    torch._dynamo.reset()
    w = torch.randn(256, 512, device="cuda").bfloat16()
    q = ts_quant.quantize(w, "fp8", layout=layout)

    def net(x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, q).relu()

    compiled = torch.compile(net, fullgraph=True)
    x = torch.randn(16, 512, device="cuda").bfloat16()
    torch.testing.assert_close(compiled(x), net(x))


def test_which_products_this_machine_has(capsys: pytest.CaptureFixture[str]) -> None:
    """To read; rows must be there on sm_90, where torch has had them since 2.5."""
    device = torch.device("cuda", torch.cuda.current_device())
    kinds = (fp8.ROWS, fp8.GROUPS, fp8.GROUPS_PADDED)
    found = {kind: fp8.supported(device, kind) for kind in kinds}
    with capsys.disabled():
        print(f"\nFP8 products on {torch.cuda.get_device_name()}: {found}")
    if torch.cuda.get_device_capability() == (9, 0):
        assert found[fp8.ROWS]
