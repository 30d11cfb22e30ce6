"""FP8 products on tensor cores beside bf16 and beside decode + bf16 product, on a GPU.

    python packages/ts-quant/benchmarks/matmul.py                       # Qwen2.5-14B's shapes
    python packages/ts-quant/benchmarks/matmul.py --tokens 2048

Times are medians with the L2 cache flushed (triton.testing.do_bench), in microseconds: "bf16" is
F.linear on a bf16 weight, "decode" is decode + that product, "fp8" is quantizing the activation,
preparing the weight where its layout asks for it, and the FP8 product; "x once" leaves the
activation's quantization out, as for the second of q, k and v. Relative errors are against fp32.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from triton.testing import do_bench

import ts_quant
from ts_quant.matmul import fp8
from ts_quant.matmul.rows import fp8_groups, fp8_rows

SHAPES = {"q/o": (5120, 5120), "gate/up": (13824, 5120), "down": (5120, 13824)}


def us(call: Callable[[], object]) -> float:
    ms: float = do_bench(call, warmup=10, rep=40, return_mode="median")
    return ms * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="*", default=[512, 2048])
    arguments = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {torch.cuda.get_device_name()}")
    for kind in (fp8.ROWS, fp8.GROUPS):
        print(f"fp8 product with activations by {kind}: {fp8.supported(device, kind)}")
        if not fp8.supported(device, kind):
            show_failure(device, kind)
    print(f"{'shape':<10}{'tokens':>7}{'layout':>7}{'bf16':>8}{'decode':>8}{'fp8':>8}{'x once':>8}"
          f"{'quant x':>9}{'error':>9}{'decode error':>13}")  # fmt: skip
    for name, (n, k) in SHAPES.items():
        w = torch.randn(n, k, device=device, dtype=torch.bfloat16) * 0.02
        for tokens in arguments.tokens:
            x = torch.randn(tokens, k, device=device, dtype=torch.bfloat16)
            exact = x.float() @ w.float().t()
            plain_us = us(lambda x=x, w=w: torch.nn.functional.linear(x, w))  # type: ignore[misc]
            for layout in (None, "row", "tile"):
                q = ts_quant.quantize(w, "fp8", layout=layout)
                line = one(q, x, exact)
                print(f"{name:<10}{tokens:>7}{layout or 'mx':>7}{plain_us:>8.1f}{line}")


def one(q: ts_quant.QuantTensor, x: torch.Tensor, exact: torch.Tensor) -> str:
    def error(y: torch.Tensor) -> float:
        return float((y.float() - exact).norm() / exact.norm())

    out = torch.empty(q.shape, dtype=torch.bfloat16, device=x.device)

    def decoded() -> torch.Tensor:
        return torch.nn.functional.linear(x, q.dequantize(out=out))

    decode_us, decode_error = us(decoded), error(decoded())
    kind = fp8.activation_kind(q.spec, q.shape, x.shape[0])
    if kind is None or not fp8.supported(x.device, kind):
        return f"{decode_us:>8.1f}{'-':>8}{'-':>8}{'-':>9}{'-':>9}{decode_error:>13.5f}"
    quantizer = fp8_rows if kind == fp8.ROWS else fp8_groups
    codes, scale = quantizer(x)

    def product() -> torch.Tensor:
        return fp8.fp8_linear(codes, scale, q.buffers(), q.spec, kind, None)

    reference = fp8.linear_reference(
        codes, scale, *q.buffers(), q.spec.scales == "e8m0", kind == fp8.GROUPS, None
    )
    wrong = float((product().float() - reference.float()).norm() / reference.float().norm())
    if wrong > 5e-3:
        return f" WRONG: {wrong:.4f} from its reference"
    both_us = us(lambda: fp8.fp8_linear(*quantizer(x), q.buffers(), q.spec, kind, None))
    return (
        f"{decode_us:>8.1f}{both_us:>8.1f}{us(product):>8.1f}{us(lambda: quantizer(x)):>9.1f}"
        f"{error(product()):>9.5f}{decode_error:>13.5f}"
    )


def show_failure(device: torch.device, kind: str) -> None:
    """What torch says, by each way of passing the scales."""
    n = 512
    w = torch.zeros(n, n, dtype=torch.float8_e4m3fn, device=device)
    x_scale, w_scale = torch.ones(4, n, device=device), torch.ones(4, 4, device=device)
    functional = torch.nn.functional
    ways: dict[str, Callable[[], object]] = {
        "rows": lambda: torch._scaled_mm(
            w, w.t(), scale_a=x_scale[:1].t().contiguous(), scale_b=x_scale[:1].contiguous(),
            out_dtype=torch.bfloat16,
        ),
        "_scaled_mm 1x128 by 128x128": lambda: torch._scaled_mm(
            w, w.t(), scale_a=x_scale.t(), scale_b=w_scale.t(), out_dtype=torch.bfloat16
        ),
        "scaled_mm, scale_b transposed": lambda: functional.scaled_mm(
            w, w.t(), x_scale.t(), functional.ScalingType.BlockWise1x128, w_scale.t(),
            functional.ScalingType.BlockWise128x128, output_dtype=torch.bfloat16,
        ),
        "scaled_mm, scale_b as it is": lambda: functional.scaled_mm(
            w, w.t(), x_scale.t(), functional.ScalingType.BlockWise1x128, w_scale,
            functional.ScalingType.BlockWise128x128, output_dtype=torch.bfloat16,
        ),
    }  # fmt: skip
    for name, call in ways.items():
        try:
            call()
            print(f"  {name}: runs")
        except Exception as error:  # what is printed is the result
            print(f"  {name}: {type(error).__name__}: {str(error)[:300]}")


if __name__ == "__main__":
    main()
