"""Launch plans of rotary and RMSNorm tried beside today's: time, share of the copy rate, bits.

    python packages/ts-kernels/benchmarks/tune.py [--json FILE] [--seconds 40] [--only NAME ...]

For each kernel and size: the fastest plan, the fastest with the bits of today's plan, and today's.
`same` compares every result with that of today's plan on one input; a plan that changes the order
of a sum differs by rounding. Times and shares as in all_kernels.py, but backward is timed alone. A
plan that fails is named at the end, as are those not reached in time. Other processes fill Triton's
cache first, several plans at a time. A CUDA GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _timing import L2_SEVERAL_TIMES, copy_rate_gb_s, milliseconds

from ts_kernels import _rms_norm_launch, _rotary
from ts_kernels._rms_norm_launch import Form
from ts_kernels._rms_norm_plan import backward_plan, forward_plan
from ts_kernels._rotary_plan import RotaryPlan, plan_by_groups, rotary_plan

BF16 = torch.bfloat16
LLAMA, GEMMA = Form(1e-6), Form(1e-6, 1.0, False)


@dataclass
class Case:
    """One kernel at one size, with `plans` in place of what `module.name` returns."""

    kernel: str
    size: str
    module: Any
    name: str
    today: Any
    plans: list[Any]
    make: Callable[[], tuple[Any, ...]]
    function: Callable[..., tuple[torch.Tensor, ...]]
    bytes_moved: int
    bytes_set: int  # of what `make` makes


@dataclass
class Row:
    kernel: str
    size: str
    plan: str
    us: float
    share: float
    same: bool


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(BF16)


def rotary_case(tokens: int, interleaved: bool, backward: bool) -> Case:
    heads, kv_heads, size = 40, 8, 128

    def make():
        q, k = (randn(1, tokens, n, size).transpose(1, 2) for n in (heads, kv_heads))
        angles = torch.randn(1, tokens, size // 2, device="cuda").repeat(1, 1, 2)
        return q, k, angles.cos().to(BF16), angles.sin().to(BF16)

    def function(q, k, cos, sin):
        return _rotary._rotate(q, k, cos, sin, interleaved, backward)

    moved = tokens * (heads + kv_heads) * size * 2
    return Case(
        f"rotary{' pairs' if interleaved else ''} {'backward' if backward else 'forward'}",
        f"{tokens} x {heads}+{kv_heads}",
        _rotary,
        "rotary_plan",
        rotary_plan(heads, kv_heads, size // 2, True),
        [
            plan_by_groups(heads, kv_heads, size // 2),
            *(RotaryPlan(True, h, w) for h, w in ((8, 2), (8, 4), (8, 1), (16, 4), (16, 2))),
        ],
        make,
        function,
        2 * moved,
        moved,
    )


def forward_case(rows: int, hidden: int, form: Form, changes: list[dict[str, Any]]) -> Case:
    today = forward_plan(rows, hidden, True, form.round_first)
    size = rows * hidden * 2

    def make():
        return randn(rows, hidden), randn(hidden)

    def function(x, weight):
        normed = _rms_norm_launch.forward(x, None, weight, form)
        return normed.y, normed.rstd

    return Case(
        f"rms_norm{', Gemma' if form is GEMMA else ''} forward",
        f"{rows} x {hidden}",
        _rms_norm_launch,
        "forward_plan",
        today,
        [today._replace(**change) for change in changes],
        make,
        function,
        2 * size,
        size,
    )


def backward_case(rows: int, hidden: int, added: bool, changes: list[dict[str, Any]]) -> Case:
    """With a weight gradient. `added`: of add_rms_norm."""
    today = backward_plan(rows, hidden, True, 6 if added else 4, added)
    size = rows * hidden * 2

    def make():
        x, dy = randn(rows, hidden), randn(rows, hidden)
        dsum = randn(rows, hidden) if added else None
        rstd = torch.rsqrt(x.float().square().mean(1) + 1e-6)
        return dy, dsum, x, randn(hidden), rstd

    def function(*inputs):
        return _rms_norm_launch.backward(*inputs, LLAMA, True, True)

    return Case(
        f"{'add_' if added else ''}rms_norm backward",
        f"{rows} x {hidden}",
        _rms_norm_launch,
        "backward_plan",
        today,
        [today._replace(**change) for change in changes],
        make,
        function,
        (4 if added else 3) * size,
        (3 if added else 2) * size,
    )


def cases() -> list[Case]:
    def split(rows: int, programs: int, rows_per_tile: int = 1) -> dict[str, int]:
        tiles = -(-rows // rows_per_tile)
        tiles_per_program = -(-tiles // programs)
        return {
            "rows_per_tile": rows_per_tile,
            "tiles_per_program": tiles_per_program,
            "programs": -(-tiles // tiles_per_program),
        }

    registers: list[dict[str, Any]] = [
        {"stages": 1, "ahead": ahead, "unroll": 4} for ahead in (1, 2)
    ]
    shared = {"stages": 2, "ahead": 0, "unroll": 1}
    more_warps = {"num_warps": 16, "unroll": 4}
    warps = [{"num_warps": w, "early_weight": e} for w in (2, 4, 8) for e in (True, False)]
    return [
        rotary_case(8192, False, False),
        backward_case(
            8192,
            5120,
            False,
            [
                *registers,
                {"stages": 3, "unroll": 1},
                {"stages": 3, "unroll": 4},
                {"joined": True, "unroll": 4},
                *({**change, "joined": True} for change in registers),
                more_warps,
                {**registers[0], **more_warps, "joined": True},
                {**registers[0], **more_warps},
                {**registers[0], **split(8192, 264), "joined": True},
                {**more_warps, **split(8192, 128, 2), "stages": 2},
            ],
        ),
        forward_case(8192, 4096, GEMMA, [*warps, {"num_warps": 1}, {"num_warps": 16}]),
        rotary_case(8192, False, True),
        rotary_case(8192, True, False),
        backward_case(8192, 4096, True, [*registers, shared, {**shared, "stages": 3}, more_warps]),
        backward_case(8192, 4096, False, [*registers, more_warps]),
        backward_case(8192, 8192, True, [*registers, shared, {**shared, "stages": 3}, more_warps]),
        rotary_case(2048, False, False),
        rotary_case(512, False, False),
        backward_case(512, 5120, False, [*registers, {"unroll": 4}]),
        forward_case(8192, 5120, LLAMA, warps[2:]),
    ]


def chosen(only: list[str]) -> list[Case]:
    found = cases()
    return [c for c in found if not only or any(c.kernel.startswith(name) for name in only)]


def compile_part(only: list[str], part: int, parts: int) -> None:
    """Runs every parts-th plan once."""
    pairs = [(case, plan) for case in chosen(only) for plan in (case.today, *case.plans)]
    for case, plan in pairs[part::parts]:
        try:
            with planned(case, plan):
                case.function(*case.make())
        except Exception as error:  # met again, and listed, by the process that measures
            print(f"{case.kernel} {case.size}: {error!r}", file=sys.stderr)
    torch.cuda.synchronize()


def compile_together(only: list[str], parts: int, seconds: float) -> None:
    """Fills Triton's cache from processes of their own; what they leave is compiled later."""
    command = [sys.executable, __file__, "--only", *only]
    started = [
        subprocess.Popen([*command, "--part", str(part), str(parts)], stderr=subprocess.DEVNULL)
        for part in range(parts)
    ]
    end = time.monotonic() + seconds
    for process in started:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def planned(case: Case, plan: Any) -> Iterator[None]:
    """Within it the kernel is launched by `plan`."""
    before = getattr(case.module, case.name)
    setattr(case.module, case.name, lambda *args: plan)
    try:
        yield
    finally:
        setattr(case.module, case.name, before)


def described(case: Case, plan: Any) -> str:
    """What the plan has unlike today's."""
    pairs = zip(plan._fields, plan, case.today, strict=True)
    changed = [f"{name}={value}" for name, value, today in pairs if value != today]
    return " ".join(changed) or "today"


def measured(
    case: Case, copy: float, out_of_time: Callable[[], bool]
) -> tuple[list[Row], list[str]]:
    """The rows, fastest first, and what was not measured."""
    rows, missing = [], []
    expected: tuple[torch.Tensor, ...] = ()
    sets = [case.make() for _ in range(max(1, min(32, L2_SEVERAL_TIMES // case.bytes_set)))]
    for plan in [case.today, *(plan for plan in case.plans if plan != case.today)]:
        text = described(case, plan)
        if out_of_time():
            missing.append(f"{case.kernel} {case.size} {text}: out of time")
            continue
        try:
            with planned(case, plan):
                results = case.function(*sets[0])
                us = 1e3 * milliseconds([partial(case.function, *each) for each in sets])
        except Exception as error:  # one that does not compile or fit; the others are of interest
            missing.append(f"{case.kernel} {case.size} {text}: {type(error).__name__}: {error}")
            continue
        expected = expected or results
        same = all(map(torch.equal, results, expected))
        share = case.bytes_moved / us / 1e3 / copy
        rows.append(Row(case.kernel, case.size, text, us, share, same))
    return sorted(rows, key=lambda row: row.us), missing


def of_interest(rows: list[Row]) -> list[Row]:
    """The fastest, the fastest with today's bits, today's."""
    same = [row for row in rows if row.same][:1]
    today = [row for row in rows if row.plan == "today"]
    return [row for row in rows if row in rows[:1] or row in same or row in today]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write all rows here")
    parser.add_argument("--seconds", type=float, default=40.0, help="no plan is begun after these")
    parser.add_argument("--only", nargs="*", default=[], help="kernels whose name begins so")
    parser.add_argument("--workers", type=int, default=8, help="processes that compile")
    parser.add_argument("--part", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs a CUDA GPU; torch sees none.")
    if options.part is not None:
        compile_part(options.only, *options.part)
        return
    started = time.monotonic()
    compile_together(options.only, options.workers, options.seconds / 2)
    compiled = time.monotonic() - started
    copy = copy_rate_gb_s()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy rate {copy:.0f} GB/s")
    rows: list[Row] = []
    missing: list[str] = []
    for case in chosen(options.only):
        found, lost = measured(case, copy, lambda: time.monotonic() - started > options.seconds)
        rows += found
        missing += lost
        for row in of_interest(found):
            bits = "same" if row.same else "other bits"
            print(
                f"{row.kernel:<24}{row.size:<13}{row.us:>7.1f} us {row.share:>4.0%}  {bits:<11}"
                f"{row.plan}",
                flush=True,
            )
    total = time.monotonic() - started
    print(f"{total:.0f} s ({compiled:.0f} to compile), {len(rows)} timed, {len(missing)} not")
    for text in missing[:2]:
        print(f"not timed: {' '.join(text.split()):.160}")
    if options.json is not None:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        data = {**about, "copy_gb_s": copy, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps({**data, "not_timed": missing}, indent=1))


if __name__ == "__main__":
    main()
