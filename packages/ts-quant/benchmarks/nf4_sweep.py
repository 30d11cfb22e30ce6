# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""NF4 decode to bf16 on a GPU: every promising kernel and shape, each checked before it is timed.

    python packages/ts-quant/benchmarks/nf4_sweep.py                # 13824 x 5120, under a minute
    python packages/ts-quant/benchmarks/nf4_sweep.py --rows 5120 --columns 5120

"fill" and "copy" are the practical ceilings of a pure write and of a read with a write. The winner
belongs in `shuffle_triton.DEFAULT_CONFIG`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product

import torch
import triton
import triton.language as tl
from triton.testing import do_bench

import ts_quant
from ts_quant.codecs import nibble_triton, shuffle_triton
from ts_quant.codecs.base import codec_named
from ts_quant.codecs.nibble_triton import select_value
from ts_quant.codecs.shuffle_triton import _LANE, _decoded, _store

Call = Callable[[], None]


@triton.jit
def _persistent(
    words_ptr,
    absmax_ptr,
    pairs_ptr,
    n_words,
    steps,
    WORDS: tl.constexpr,
    CS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """A fixed number of programs, each walking through the tensor."""
    index = tl.arange(0, WORDS)
    lane = tl.inline_asm_elementwise(_LANE, "=r,r", [index], dtype=tl.int32, is_pure=True, pack=1)
    table = select_value(lane & 15).to(tl.int32, bitcast=True)
    stride = tl.num_programs(0) * WORDS
    first = tl.program_id(0) * WORDS
    place = first + index
    word = tl.load(words_ptr + place, mask=place < n_words, other=0)
    scale = tl.load(absmax_ptr + place // 8, mask=place < n_words, other=0.0)
    for _ in range(steps):
        if AHEAD:
            place += stride
            next_word = tl.load(words_ptr + place, mask=place < n_words, other=0)
            next_scale = tl.load(absmax_ptr + place // 8, mask=place < n_words, other=0.0)
            _store(pairs_ptr, first, _decoded(word, table, scale, False, False), n_words, CS)
            word = next_word
            scale = next_scale
        else:
            _store(pairs_ptr, first, _decoded(word, table, scale, False, False), n_words, CS)
            place += stride
            word = tl.load(words_ptr + place, mask=place < n_words, other=0)
            scale = tl.load(absmax_ptr + place // 8, mask=place < n_words, other=0.0)
        first += stride


def persistent(
    q: ts_quant.QuantTensor, out: torch.Tensor, warps: int, per_sm: int, cs: bool, ahead: bool
) -> Call:
    codes, absmax = q.buffers()
    n_words = out.numel() // 8
    words = 32 * warps
    programs = torch.cuda.get_device_properties(0).multi_processor_count * per_sm
    steps = triton.cdiv(n_words, words * programs)
    code_words, pairs = codes.view(-1).view(torch.int32), out.view(-1).view(torch.int32)

    def call() -> None:
        _persistent[(programs,)](
            code_words,
            absmax,
            pairs,
            n_words,
            steps,
            WORDS=words,
            CS=cs,
            AHEAD=ahead,
            num_warps=warps,
        )

    return call


def variants(q: ts_quant.QuantTensor, out: torch.Tensor) -> dict[str, Call]:
    calls: dict[str, Call] = {}
    for words, warps in ((128, 1), (512, 4), (1024, 8)):
        config = nibble_triton.DecodeConfig("gather", words, warps)
        calls[f"gather words={words} warps={warps}"] = lambda c=config: nibble_triton.decode_out(  # type: ignore[misc]
            q.buffers(), q.spec, out, c
        )
    shapes = [(w, u, s, 1) for w, u, s in product((1, 2, 4, 8, 16), (1, 2, 4), ("", ".cs"))]
    shapes += [(4, 1, "", 4), (8, 1, "", 4)]
    for warps, unroll, store, each in shapes:
        shape = shuffle_triton.ShuffleConfig(warps, unroll, store, each)
        calls[f"shuffle {shape}"] = lambda c=shape: shuffle_triton.decode_out(  # type: ignore[misc]
            q.buffers(), q.spec, out, c
        )
    for warps, per_sm, cs, ahead in (
        (8, 8, False, True),
        (8, 4, True, True),
        (4, 16, False, True),
        (8, 8, False, False),
        (16, 4, False, True),
    ):
        name = f"persistent warps={warps} per_sm={per_sm} cs={cs} ahead={ahead}"
        calls[name] = persistent(q, out, warps, per_sm, cs, ahead)
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=13824)
    parser.add_argument("--columns", type=int, default=5120)
    parser.add_argument("--rep", type=int, default=30, help="milliseconds per variant")
    arguments = parser.parse_args()
    w = torch.randn(arguments.rows, arguments.columns, device="cuda", dtype=torch.bfloat16)
    q = ts_quant.quantize(w, "nf4")
    expected = torch.empty_like(w)
    codec_named("nf4").decode_reference(q.buffers(), q.spec, expected)  # type: ignore[attr-defined]
    out = torch.empty_like(w)
    moved_bytes = q.nbytes + 2 * out.numel()
    print(f"torch {torch.__version__}, triton {triton.__version__}, {torch.cuda.get_device_name()}")
    print(f"{tuple(w.shape)}: {moved_bytes / 1e6:.1f} MB")

    def timed(call: Callable[[], object]) -> float:
        ms: float = do_bench(call, warmup=10, rep=arguments.rep, return_mode="median")
        return ms

    fill = timed(lambda: out.fill_(1.0))
    copy = timed(lambda: out.copy_(w))
    print(
        f"fill {2 * out.numel() / fill / 1e9:.2f} TB/s, "
        f"copy {4 * out.numel() / copy / 1e9:.2f} TB/s"
    )
    rows = []
    for name, call in variants(q, out).items():
        out.fill_(float("nan"))
        try:
            call()
            torch.cuda.synchronize()
        except Exception as error:  # a variant the compiler refuses is a result too
            print(f"  {name}: does not run ({type(error).__name__}: {str(error)[:200]})")
            continue
        if not torch.equal(out, expected):
            print(f"  {name}: WRONG VALUES")
            continue
        rows.append((timed(call), name))
    for ms, name in sorted(rows):
        print(f"  {ms * 1e3:7.1f} us {moved_bytes / ms / 1e9:5.2f} TB/s  {name}")


if __name__ == "__main__":
    main()
